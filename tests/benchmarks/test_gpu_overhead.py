"""What recording adds and how often it waits for the GPU: the decisions, and what counts the calls."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu import overhead
from benchmarks.gpu.jobs import Ended

COMPILER = shutil.which("cc") or shutil.which("gcc")

# As CUDA's runtime has it: a shared library of versioned symbols, each of which does as it is told.
RUNTIME = """
int cudaDeviceSynchronize(void) { return 35; }
int cudaStreamSynchronize(void *stream) { return stream ? 400 : 0; }
int cudaEventSynchronize(void *event) { return event ? 0 : 400; }
int cudaMemcpyAsync(void *to, const void *from, unsigned long bytes, int kind, void *stream) {
  for (unsigned long n = 0; n < bytes; n++) ((char *)to)[n] = ((const char *)from)[n];
  return kind + (stream != 0);
}
int cudaEventQuery(void *event) { return event != 0; }
"""
# Its caller is loaded into a program as Python loads an extension: with what it links to hidden from all others.
CALLER = """
int cudaDeviceSynchronize(void), cudaStreamSynchronize(void *), cudaEventSynchronize(void *), cudaEventQuery(void *);
int cudaMemcpyAsync(void *, const void *, unsigned long, int, void *);
int work(void) {
  char from[4] = "abc", to[4] = "";
  int said = cudaMemcpyAsync(to, from, 4, 2, from);
  said = 10 * said + (to[2] == 'c');
  said += cudaDeviceSynchronize() + cudaStreamSynchronize(0) + cudaStreamSynchronize(from);
  return said + cudaEventSynchronize(from) + cudaEventQuery(0);
}
"""
PROGRAM = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
  void *library = dlopen(words[count - 1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return puts(dlerror()), 1;
  printf("%d\\n", ((int (*)(void))dlsym(library, "work"))());
  return 0;
}
"""


def build(folder: Path) -> list[str]:
    """Build a program that loads a library which calls the runtime; give its command line."""
    for name, text in (("libcudart.c", RUNTIME), ("caller.c", CALLER), ("program.c", PROGRAM)):
        (folder / name).write_text(text)
    (folder / "map").write_text("libcudart.so.13 { global: *; };\n")
    runtime = ["-shared", "-fPIC", "-Wl,--version-script=map", "-Wl,-soname,libcudart.so.13", "-o", "libcudart.so.13"]
    caller = ["-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", "-o", "caller.so", "caller.c", "libcudart.so.13"]
    for words in (
        [*runtime, "libcudart.c"],
        caller,
        ["-o", "program", "program.c", "-ldl"],
        ["-shared", "-fPIC", "-O2", "-o", "syncs.so", str(overhead.SHIM), "-ldl", "-lpthread"],
    ):
        subprocess.run([str(COMPILER), *words], cwd=folder, check=True)
    return [str(folder / "program"), str(folder / "caller.so")]


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_every_wait_is_seen_and_does_what_it_did(tmp_path: Path) -> None:
    words = build(tmp_path)
    plain = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    env = {"LD_PRELOAD": str(tmp_path / "syncs.so"), "SYNCS_FILE": str(tmp_path / "calls")}
    watched = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert watched.stdout == plain == "466\n"
    calls = [text.split() for text in (tmp_path / "calls").read_text().splitlines()]
    assert [name for _, name in calls] == [
        "cudaMemcpyAsync",
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
    ]
    times = [float(when) for when, _ in calls]
    assert times == sorted(times)


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_without_a_file_nothing_is_written_and_nothing_breaks(tmp_path: Path) -> None:
    words = build(tmp_path)
    for path in ("", "/no/such/folder/calls"):
        env = {"LD_PRELOAD": str(tmp_path / "syncs.so"), "SYNCS_FILE": path}
        assert subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout == "466\n"


LOG = """
10.000000000 cudaMemcpyAsync
10.100000000 cudaStreamSynchronize
10.300000000 cudaMemcpyAsync
10.400000000 cudaMemcpyAsync
10.500000000 cudaEventSynchronize
10.600000000 cudaMemcpyAsync
half a li
"""


def job(*lines: tuple[float, str]) -> Ended:
    return Ended((), 0, 1.0, lines, "")


def test_calls_are_those_between_two_reads_of_the_loss_whenever_their_lines_came() -> None:
    # The line of the first read came when the next step had begun to copy already.
    ended = job((10.35, "step 40  loss 2"), (10.55, "step 80  loss 1"))
    assert overhead.between_lines(LOG, ended, 40, 80) == {"cudaMemcpyAsync": 2, "cudaEventSynchronize": 1}
    with pytest.raises(ValueError, match="no line of step 80"):
        overhead.between_lines(LOG, job((10.35, "step 40")), 40, 80)
    with pytest.raises(ValueError, match="did not wait"):
        overhead.between_lines(LOG, job((10.05, "step 40"), (10.55, "step 80")), 40, 80)
    # Nothing was seen at all: that is for the judge to say.
    assert overhead.between_lines("", ended, 40, 80) == {}


def states(counts: dict[str, Counter[str]], reads: int = 2) -> dict[str, str]:
    return {part.name: part.state for part in overhead.of_calls(counts, reads)}


def test_one_more_wait_than_without_dlprof_fails() -> None:
    plain = Counter({"cudaStreamSynchronize": 2, "cudaMemcpyAsync": 42})
    same = {way: Counter(plain) for way in overhead.WAYS}
    assert set(states(same).values()) == {"passed"}
    for name in ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaDeviceSynchronize"):
        more = {**same, "light": plain + Counter({name: 1})}
        assert [part for part, state in states(more).items() if state == "failed"] == ["light: calls"]
    fewer = {**same, "all": plain - Counter({"cudaMemcpyAsync": 1})}
    assert states(fewer)["all: calls"] == "failed"
    allocates = {**same, "all": plain + Counter({"cudaMalloc": 3})}
    assert [part for part, state in states(allocates).items() if state == "failed"] == [
        "no memory taken from the GPU or given back"
    ]


def test_what_sees_none_of_the_jobs_own_reads_proves_nothing() -> None:
    nothing = {way: Counter[str]() for way in overhead.WAYS}
    assert states(nothing) == {"synchronising calls": "skipped"}
    one = {way: Counter({"cudaStreamSynchronize": 1}) for way in overhead.WAYS}
    assert states(one)["calls that are seen"] == "failed"


def test_what_is_added_is_the_median_of_runs_made_in_turn() -> None:
    # The machine became slower from round to round, by far more than recording adds.
    times = {"plain": [40.0, 42.0, 44.0], "light": [40.2, 42.1, 44.3], "all": [40.6, 42.9, 44.7]}
    parts = {part.name: part for part in overhead.of_times(times)}
    assert parts["light adds"].state == "passed"
    assert parts["light adds"].said == pytest.approx(0.005)
    assert parts["all adds"].state == "passed"
    slower = {**times, "light": [t * 1.011 for t in times["plain"]], "all": [t * 1.021 for t in times["plain"]]}
    assert [part.state for part in overhead.of_times(slower)] == ["failed", "failed"]
    untimed = {**times, "light": [float("nan")] * 3}
    assert overhead.of_times(untimed)[0].state == "failed"
