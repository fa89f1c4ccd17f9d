"""What all else stands on: units, files, errors, tables, marks, printed text, messages of CUPTI and nsys."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import dlprof
from dlprof import marks, nsys, run_folder, schema, units
from dlprof.cupti import loss, remedy, short
from dlprof.errors import DlprofError
from dlprof.files import whole, write, writing
from dlprof.plain import plain, tell, words_of
from dlprof.record.launch.supervisor import recorded
from tests.fixtures import traces
from tests.fixtures.jobs import DLPROF, environment, launch, noted

WRITTEN: list[tuple[Callable[..., object], list[tuple[object, ...]]]] = [
    (units.duration, [
        (0, "0 ns"), (640, "640 ns"), (18_340, "18.3 µs"), (999.6, "1.00 µs"), (999_960, "1.00 ms"),
        (214_600_000, "214.6 ms"), (999_940_000, "999.9 ms"), (999_960_000, "1.00 s"), (7.2e12, "7,200 s"),
        (-66e6, "−66.0 ms"), (math.nan, "—"), (-math.inf, "—"),
    ]),
    (units.size, [(0, "0 B"), (12, "12 B"), (2_312e6, "2.31 GB"), (77.1e6, "77.1 MB"), (5e15, "5,000 TB")]),
    (units.percent, [
        (0, "0 %"), (0.0001, "< 0.1 %"), (0.0449, "4.5 %"), (0.0994, "9.9 %"), (0.0996, "10 %"), (0.46, "46 %"),
        (1.5, "150 %"), (-0.2, "−20 %"), (math.nan, "—"),
    ]),
    (units.quantity, [
        (0.25, "share", "25 %"), (4.2e6, "ns", "4.20 ms"), (1_234_567, "", "1,234,567"), (0.00012, "s", "0.00012 s"),
        (1234.5, "MHz", "1,234 MHz"), (591_872, "FLOP", "591.9 kFLOP"), (1.56e15, "FLOP", "1.56 PFLOP"),
        (math.inf, "bytes", "—"),
    ]),
    (units.scale, [
        ("ns", 4e6, (1e6, "ms")), ("ns", 0, (1.0, "ns")), ("bytes", 12, (1.0, "B")), ("share", 0.3, (0.01, "%")),
        ("watts", 300, (1.0, "watts")),
    ]),
    (units.count, [
        (1, "copy", "1 copy"), (3, "copy", "3 copies"), (2.5, "batch", "2.5 batches"), (0, "rank", "0 ranks"),
        (12_000, "kernel", "12,000 kernels"), (61.4, "kernel", "61 kernels"),
    ]),
    (units.short, [("x" * 12, 12, "x" * 12), ("x" * 13, 12, "x" * 11 + "…")]),
    (units.few, [([1, 2, 3], 3, "1, 2, 3"), (["a", "b", "c"], 2, "a, b …")]),
    (units.often, [(1, "once"), (2.0, "twice"), (10, "10 times"), (2.5, "2.50 times")]),
    (units.every, [
        (1.0, "step", "every step"), (2.0, "step", "every 2nd step"), (3.0, "step", "every 3rd step"),
        (11, "step", "every 11th step"), (21, "step", "every 21st step"), (4.92, "step", "every 5th step"),
        (1.3, "step", "about every step"),
    ]),
    (units.typed, [
        (0.3, 1), (7, 7), (9.2, 10), (10, 10), (10.5, 12), (101, 120), (131, 150), (138, 150), (2000, 2000),
        (9001, 10000),
    ]),
    (units.is_now, [(None, ""), (0, " (is 0)"), (False, " (is False)")]),
    (units.listed, [([3], "3"), ([5, 3], "3, 5"), ([0, 1, 2, 4], "0 to 2, 4"), (range(8), "0 to 7")]),
    (units.ranks_named, [
        ([3], "rank 3"), ([5, 3], "ranks 3 and 5"), ([0, 1, 2, 4], "ranks 0 to 2 and 4"), (range(8), "ranks 0 to 7"),
    ]),
    (plain, [
        ("a b", "a b"), ("a\nb", "a\\x0ab"), ("\x1b[2J", "\\x1b[2J"), ("\u202e", "\\u202e"), ("\udcff", "\\udcff"),
        ("abcdef", 4, "abc…"),
    ]),
    (words_of, [
        (OSError("the disk is full"), "the disk is full"), (DlprofError("no run"), "no run"),
        (KeyError("rank"), "KeyError: 'rank'"),
    ]),
    (run_folder.rank_name, [
        (0, "", "00000"), (255, ".r2", "00255.r2"), (256, "", "00256-00511/00256"),
        (12_345, ".r1", "12288-12543/12345.r1"), (123_456, "", "123392-123647/123456"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "written"),
    [(function, case[:-1], case[-1]) for function, cases in WRITTEN for case in cases],
)
def test_how_it_is_written(function: Callable[..., object], arguments: tuple[object, ...], written: object) -> None:
    assert function(*arguments) == written


def test_many_ranks_are_counted_and_a_number_to_type_is_round_and_not_below() -> None:
    assert units.listed(range(0, 100, 2)).endswith("(50 ranks)")
    assert all(n <= units.typed(n) <= 1.34 * n for n in range(10, 5000))


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "report.html").symlink_to(precious)
    write(tmp_path / "report.html", "page")
    assert (precious.read_text(), (tmp_path / "report.html").read_text()) == ("mine", "page")
    assert not (tmp_path / "report.html").is_symlink()


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "run.json", "old")

    def fails() -> None:
        with whole(tmp_path / "run.json") as part:
            part.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("run.json", "old")]


def test_a_link_in_the_place_of_an_unfinished_file_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    monkeypatch.setattr(os, "urandom", bytes)  # zeros: somebody guessed the name
    for link in (tmp_path / "precious", tmp_path / "nothing"):
        part = tmp_path / f".run.json.{'00' * 8}.tmp"
        part.unlink(missing_ok=True)
        part.symlink_to(link)
        with pytest.raises(FileExistsError):
            write(tmp_path / "run.json", "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == [part.name, "precious"]
    assert precious.read_text() == "mine"


def test_what_cannot_be_written_is_said_with_why_and_what_to_do(tmp_path: Path) -> None:
    why = r"^the report cannot be written: No such file or directory; -o helps$"
    with pytest.raises(DlprofError, match=why), writing("the report", "; -o helps"):
        write(tmp_path / "none" / "report.html", "page")


# A name that clears the screen, and one that pretends to be a line of ours.
EVIL = "a\x1b[2Jb\nreport: theirs\u202e"


def harmless(said: str) -> bool:
    return "\x1b[2J" not in said and "\u202e" not in said and "\nreport: theirs" not in said


@pytest.mark.long
def test_commands_print_no_path_raw(tmp_path: Path) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    traces.write(folder / "rank0.json", traces.training())
    out = tmp_path / f"{EVIL} out"
    asked = (
        ("report", folder / "none"),
        ("report", folder, "-o", out, "--quiet"),
        ("export", folder, "--quiet", "--perfetto", folder / "all.json"),
        ("compare", folder, folder, "-o", out, "--quiet"),
        ("wrap", "-o", tmp_path / f"{EVIL} run", "--no-report", "--", sys.executable, "-c", "pass"),
        ("wrap", "-o", tmp_path / f"{EVIL} none", "--no-report", "--", EVIL),
    )
    for words in asked:
        done = launch([*DLPROF, *map(str, words)], tmp_path)
        assert done.stdout + done.stderr
        assert harmless(done.stdout + done.stderr), words


def test_a_line_of_ours_is_one_line_and_nothing_where_stderr_is_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plain("a\nb\x1b", keep="\n") == "a\nb\\x1b"
    tell("a\nb\x1b[2J")
    assert capfd.readouterr().err == "dlprof: a\\x0ab\\x1b[2J\n"
    code = "import os; from dlprof.plain import tell; os.close(2); tell('a'); print('on')"
    assert launch([sys.executable, "-c", code], tmp_path).stdout == "on\n"


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


def test_without_a_recorder_they_do_nothing_and_exceptions_pass() -> None:
    assert marks.recorder is None
    dlprof.step()
    with pytest.raises(KeyError), dlprof.annotate("name"):
        raise KeyError("theirs")


HEAD = "WARNING:2025-02-26 09:43:38 68350:68350 init.cpp:178] "
# As a job printed them whose driver did not fit.
SAID = [
    HEAD + "function cbapi->getCuptiStatus() failed with error CUPTI_ERROR_NOT_INITIALIZED (15)",
    "WARNING:2025-02-26 09:43:38 68350:68350 init.cpp:179] CUPTI initialization failed - CUDA profiler activities will "
    "be missing",
]


def test_messages_lose_their_heads_and_repetitions_and_what_is_too_much() -> None:
    assert short([*SAID, SAID[0], "", "  "]) == [
        "function cbapi->getCuptiStatus() failed with error CUPTI_ERROR_NOT_INITIALIZED (15)",
        "CUPTI initialization failed - CUDA profiler activities will be missing",
    ]
    assert [len(line) for line in short(f"{n} {'x' * 500}" for n in range(20))] == [240] * 8
    assert short(["no head at all"]) == ["no head at all"]


def test_only_what_costs_events_is_a_loss() -> None:
    harmless = "Adding duplicate callback -- domain = 3 callback id = 1"
    assert loss([harmless]) is None
    assert loss([]) is None
    assert loss([harmless, *short(SAID)]) == short(SAID)[0]
    assert loss(["Exceeded max GPU buffer count (33 >= 33) - terminating tracing"]) is not None


def test_each_error_has_its_own_remedy() -> None:
    assert "RestrictProfilingToAdminUsers" in remedy(["failed with error CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)"])
    assert "nsys" in remedy(["failed with error CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)"])
    assert "virtual GPU" in remedy(["… error CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES (40)"])
    # The first of several is the cause of the others.
    assert remedy(short(SAID)) == remedy(short(SAID)[:1]) != ""
    assert remedy(["something new"]) == remedy([]) == ""


def test_an_export_that_fails_says_why(tmp_path: Path) -> None:
    program, to = tmp_path / "nsys", tmp_path / "x.sqlite"
    assert "does not start" in nsys.export(str(program), tmp_path / "x.nsys-rep", to, 10)
    for body, expected in (
        ("echo no importer >&2; exit 3", "(3): no importer"),
        ("exit 0", "(0)"),
        ("exec sleep 60", "took more than 1 s"),
        (f"touch '{to}'", ""),
    ):
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        said = nsys.export(str(program), tmp_path / "x.nsys-rep", to, 1)
        assert expected in said if expected else not said


def test_no_folder_of_16384_ranks_holds_more_than_some_hundred(tmp_path: Path) -> None:
    ranks = Counter(run_folder.rank_name(rank).rpartition("/")[0] for rank in range(16_384))
    (tmp_path / run_folder.SPREAD_HOSTS).mkdir()
    hosts = Counter(run_folder.host_folder(tmp_path, f"node{n:04d}").parent for n in range(2048))
    tasks = Counter(run_folder.task_file(tmp_path, f"node{n:04d}", "b").parent for n in range(2048))
    assert max(*ranks.values(), len(ranks)) <= 256
    assert max(*hosts.values(), len(hosts), *tasks.values(), len(tasks)) <= 64


def test_flat_folders_and_folders_of_folders_are_listed_together(tmp_path: Path) -> None:
    names = ["00000", "00007.r1", "00255.4711", "00900", "00256-00511/00300", "12288-12543/12345"]
    for name in names:
        (tmp_path / "ranks" / name).mkdir(parents=True)
    assert {path.relative_to(tmp_path / "ranks").as_posix() for path in run_folder.in_ranks(tmp_path)} == {*names}
    assert not run_folder.recorded(tmp_path)
    (tmp_path / "ranks/12288-12543/12345/facts.json").write_text("{}")
    assert run_folder.recorded(tmp_path)
    assert run_folder.in_hosts(tmp_path) == []
    for host in ("hosts/b", "hosts/3f", "many-hosts/3f/a", "many-hosts/00/c"):
        (tmp_path / host).mkdir(parents=True)
    assert [path.name for path in run_folder.in_hosts(tmp_path)] == ["3f", "a", "b", "c"]


@pytest.mark.parametrize("many", [False, True])
def test_every_interpreter_of_a_job_agrees_on_the_folder_of_its_host(many: bool, tmp_path: Path) -> None:
    if many:
        (tmp_path / run_folder.SPREAD_HOSTS).mkdir()
    env = recorded(environment(), tmp_path)
    subprocess.run([sys.executable, "-c", "pass"], env=env, check=True)
    assert noted(run_folder.host_folder(tmp_path, os.uname().nodename), "hello")
    assert (tmp_path / run_folder.HOSTS).exists() != many
