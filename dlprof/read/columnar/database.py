"""Opens SQLite files, also from untrusted sources, and reads whole columns of their tables.

No code in the file runs. It is opened read-only and immutable. Only plain tables and stored columns are read: no views,
virtual tables or generated columns. Only SELECT is allowed. The file's size limits how many instructions SQLite may
run, so a damaged file cannot keep it busy. If a table is damaged, the rows before the damage are used.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dlprof.errors import DlprofError
from dlprof.read.limits import MOST_ROWS, limit, most_unpacked, too_many
from dlprof.read.opening import gunzipped, open_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MISSING = -(1 << 63)  # NULL, or a column that this version lacks

_MAGIC, _GZIP = b"SQLite format 3\0", b"\x1f\x8b"
_BLOCK = 1 << 20

# Limits on SQLite's instructions. A row of an export takes some tens of them, and at least 16 bytes. Without a limit,
# SQLite would read for years in a damaged file with pages that refer to each other.
_STEPS_A_BYTE, _STEPS_LEAST, _STEPS_AT_ONCE = 64, 50_000_000, 1_000_000

# What reading a damaged file raises; SQLite's own messages may hold bytes of it.
_ERRORS = (sqlite3.Error, OverflowError, UnicodeDecodeError)

_SQLITE_FUNCTION = 31  # sqlite3.SQLITE_FUNCTION of Python 3.11


class Database:
    """An open file. `damage`: a line for each table that could not be read to its end."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self.name = name
        self.damage: list[str] = []
        self._columns: dict[str, dict[str, str]] = {}
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        self.tables = {str(row[0]) for row in self._run("its list of tables", tables)}

    def columns(self, table: str) -> Mapping[str, str]:
        """Return the stored columns of a table: lower-case name → name; empty if there is no such table."""
        if table not in self.tables:
            return {}
        if table not in self._columns:
            rows = self._run(table, f"PRAGMA table_xinfo({_quoted(table)})")
            self._columns[table] = {str(r[1]).lower(): str(r[1]) for r in rows if not r[6]}
        return self._columns[table]

    def has(self, table: str) -> bool:
        """Return whether a table exists and has a row."""
        return any(self.rows(table, ["1"], most=1))

    def rows(
        self, table: str, what: Sequence[str], where: str = "", args: Sequence[Any] = (), most: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Return a table's rows in their order, as far as they can be read. `what`: SQL expressions, one a column."""
        if table not in self.tables:
            return iter(())
        bound = limit(MOST_ROWS) if most is None else most
        return self._run(table, f"SELECT {', '.join(what)} FROM {_quoted(table)} {where} LIMIT {bound}", args)

    def integers(
        self, table: str, names: Sequence[str], where: str = "", args: Sequence[Any] = ()
    ) -> dict[str, NDArray[np.int64]]:
        """Return columns of a table by name, int64. A name with bars (a|b) means the first column that exists."""
        import numpy as np

        read = chain.from_iterable(self.rows(table, [self.integer(table, name) for name in names], where, args))
        flat = np.fromiter(read, np.int64)
        rows = flat[: len(flat) // len(names) * len(names)].reshape(-1, len(names))
        if len(rows) >= limit(MOST_ROWS):
            self.damage.append(too_many(Path(self.name), f"rows of {table}", MOST_ROWS))
        return {name: rows[:, i].copy() for i, name in enumerate(names)}

    def integer(self, table: str, name: str) -> str:
        """Return the SQL expression for a column as integers; MISSING replaces missing values and columns."""
        held = self.columns(table)
        found = next((held[one.lower()] for one in name.split("|") if one.lower() in held), None)
        # Written out, MISSING would become a float: SQLite parses its digits first, and they are too large for int64.
        none = f"({MISSING + 1} - 1)"
        return f"ifnull(CAST({_quoted(found)} AS INTEGER), {none})" if found else none

    def texts(self, table: str, key: str, value: str, wanted: Iterable[int] | None = None) -> dict[int, str]:
        """Return a table's texts by number, only the `wanted` ones. A text is cut off after 4,000 characters."""
        held = self.columns(table)
        if key.lower() not in held or value.lower() not in held:
            return {}
        chosen = None if wanted is None else frozenset(wanted)
        what = [self.integer(table, key), f"substr({_quoted(held[value.lower()])}, 1, 4000)"]
        return {k: _text(v) for k, v in self.rows(table, what) if v is not None and (chosen is None or k in chosen)}

    def named(self, table: str) -> dict[str, str]:
        """Return a table of names and values; the first value of a name counts."""
        if not {"name", "value"} <= set(self.columns(table)):
            return {}
        found: dict[str, str] = {}
        for name, value in self.rows(table, ["substr(name, 1, 200)", "substr(value, 1, 1000)"], most=10_000):
            if name is not None and value is not None:
                found.setdefault(_text(name), _text(value))
        return found

    def _run(self, table: str, sql: str, args: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a statement, up to where the table is damaged."""
        try:
            yield from self._connection.execute(sql, args)
        except _ERRORS as e:
            line = f"{self.name}: {table} cannot be read to its end ({e}): what comes before is used"
            if line not in self.damage:
                self.damage.append(line)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def is_sqlite(path: Path) -> bool:
    """Return whether a file's first bytes, unpacked, are those of a SQLite database."""
    with open_file(path) as file:
        return gunzipped(file.read(_BLOCK), 64).startswith(_MAGIC)


@contextlib.contextmanager
def open_database(path: Path) -> Iterator[Database]:
    """Open a SQLite file, also one packed with gzip; raise DlprofError if it is none."""
    if not is_sqlite(path):
        raise DlprofError(f"{path}: not a SQLite file")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_file(path))
        plain, warnings = Path(path), []
        if file.read(2) == _GZIP:
            unpacked = stack.enter_context(tempfile.NamedTemporaryFile(prefix="dlprof-", suffix=".sqlite"))
            file.seek(0)
            warnings = _unpack(path, file, unpacked)  # type: ignore[arg-type]
            plain = Path(unpacked.name)
        connection = stack.enter_context(contextlib.closing(_connect(plain, path)))
        database = Database(connection, path.name)
        database.damage += warnings
        yield database


def _unpack(path: Path, file: BinaryIO, to: BinaryIO) -> list[str]:
    """Unpack a file into `to`, up to a limit; return a warning if it is cut off."""
    unpack, left = zlib.decompressobj(zlib.MAX_WBITS | 16), most_unpacked(path.stat().st_size)
    try:
        while not unpack.eof and (block := file.read(_BLOCK)):
            while block:
                made = unpack.decompress(block, _BLOCK)
                left -= len(made)
                if left < 0:
                    raise DlprofError(f"{path}: unpacks to more than is read (--no-limits reads it)")
                to.write(made)
                block = unpack.unconsumed_tail
    except zlib.error as e:
        return [f"{path.name}: cannot be unpacked to its end ({e}): what comes before is used"]
    finally:
        to.flush()
    return [] if unpack.eof else [f"{path.name}: the gzip file is cut off: what comes before is used"]


def _connect(file: Path, path: Path) -> sqlite3.Connection:
    """Open a file so that no code in it runs and nothing is written; files that are cut off can be opened too."""
    connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)
    connection.text_factory = lambda text: text.decode(errors="replace")
    left = _STEPS_LEAST + _STEPS_A_BYTE * file.stat().st_size

    def spend() -> int:
        nonlocal left
        left -= _STEPS_AT_ONCE
        return int(left < 0)

    try:
        for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "query_only=ON", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
        try:
            connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
        except _ERRORS:
            # Without this, SQLite reads nothing from a file that is shorter than its header says.
            connection.execute("PRAGMA writable_schema=ON")
            connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
        connection.set_authorizer(_allowed)
        connection.set_progress_handler(spend, _STEPS_AT_ONCE)
    except _ERRORS as e:
        connection.close()
        raise DlprofError(f"{path}: not a readable SQLite file: {e}") from e
    return connection


def _allowed(action: int, first: str | None, *_: str | None) -> int:
    """Authorise what a statement does: read, call functions, and list the columns of a table."""
    reads = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    calls = action == _SQLITE_FUNCTION
    lists = action == sqlite3.SQLITE_PRAGMA and first == "table_xinfo"
    return sqlite3.SQLITE_OK if reads or calls or lists else sqlite3.SQLITE_DENY
