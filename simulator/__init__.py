"""A simulator of training jobs on GPUs whose truth is known: docs/simulator.md says what it simulates, and how.

It imports nothing of dlprof: what it says must not depend on what it tests.

What stands on what: hardware.py has what things cost, and program.py what a rank can do; streams.py, loading.py,
recorder.py and machine.py run that. job.py and model.py describe a job; training.py, exchanges.py, parallel.py and
habits.py make its program. play.py plays it, and knows what is true of it. script.py, memory.py, facts.py, kineto.py,
nsys.py and folder.py write its recording. healthy.py draws healthy jobs, faults/ has jobs with a fault each.
"""
