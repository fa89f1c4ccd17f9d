"""Runs every benchmark: `make bench`."""

import runpy

for name in ("against", "report", "big_trace", "scale", "overhead", "beside"):
    print(f"== benchmarks.{name}", flush=True)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
