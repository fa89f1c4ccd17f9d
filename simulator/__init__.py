"""A simulator of training jobs on GPUs whose truth is known, to test the diagnosis with.

It knows the few rules by which CUDA runs work (program.py, process.py, streams.py), makes jobs of them (job.py,
training.py, …), and writes what PyTorch's profiler and dlprof's recorder would have left of them on disk (kineto.py,
folder.py). What the job really does, and what a fix really gains, it knows by simulating the job, and the fixed job,
without a profiler (truth.py). It imports nothing of dlprof: what it says must not depend on what it tests.
"""
