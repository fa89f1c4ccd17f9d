"""A table that is none is refused with the column's name; an empty one is a table like any other."""

import pandas as pd
import pytest

from dlprof import schema
from dlprof.errors import DlprofError


@pytest.mark.parametrize("name", schema.TABLES)
def test_an_empty_table_passes(name: str) -> None:
    frame = schema.empty(name)
    assert len(frame) == 0
    assert schema.check(name, frame) is frame


@pytest.mark.parametrize("name", schema.TABLES)
def test_a_missing_an_additional_and_a_moved_column_are_refused(name: str) -> None:
    frame = schema.empty(name)
    columns = list(frame.columns)
    for wrong in (frame[columns[1:]], frame.assign(extra=1), frame[columns[::-1]]):
        with pytest.raises(DlprofError, match=f"table {name}: columns are"):
            schema.check(name, wrong)


@pytest.mark.parametrize(("column", "dtype"), [("start_ns", "float64"), ("dur_ns", "int32"), ("name", "object")])
def test_a_column_of_another_type_is_refused_by_name(column: str, dtype: str) -> None:
    with pytest.raises(DlprofError, match=f"table spans: {column} is {dtype}"):
        schema.check("spans", schema.empty("spans").astype({column: dtype}))


def test_units_are_in_the_names_of_columns() -> None:
    for columns in schema.TABLES.values():
        times = [c for c in columns if c.endswith("_ns")]
        # What adds up over a run has no start.
        assert {"start_ns", "dur_ns"} <= set(times) or "start_ns" not in columns
        assert all(columns[c] == "int64" for c in times)


def test_concatenating_with_an_empty_table_keeps_the_types() -> None:
    both = pd.concat([schema.empty("traced_steps"), schema.empty("traced_steps")])
    assert schema.check("traced_steps", both) is both


def test_tables_are_joined_row_after_row_whatever_their_categories() -> None:
    """Each sampler has metrics of its own."""
    parts = [
        schema.empty("samples"),
        *(
            pd.DataFrame({"source": [source], "metric": [metric], "at_ns": [at], "value": [0.5]}).astype(schema.SAMPLES)
            for source, metric, at in (("gpu", "power_w", 3), ("host", "cpu_share", 1))
        ),
    ]
    both = schema.join("samples", parts)
    assert list(both["metric"]) == ["power_w", "cpu_share"]
    assert list(both["at_ns"]) == [3, 1]
