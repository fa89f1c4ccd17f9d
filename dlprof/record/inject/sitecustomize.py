"""Loads the recorder into every Python process of a recorded job, without a change of the script.

The supervisor puts this folder first on PYTHONPATH, so Python imports this file when it starts. It writes a line to
show that it was reached, and loads the recorder when torch is imported. It also runs the sitecustomize that it shadows.
It uses the standard library only, runs on Python 3.8 and later, and never makes a script fail.
"""

# Every interpreter of the job runs this when it starts; importing pathlib and contextlib would take milliseconds.
# ruff: noqa: PTH100, PTH103, PTH112, PTH118, PTH120, SIM105

import os
import sys

# The cores that the process may use, before any line of the script has run.
_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _say(error):
    """Tell the user in one line that this process is not recorded."""
    try:
        sys.stderr.write(f"dlprof: {type(error).__name__}: {error}; the job goes on without it\n")
    except Exception:  # noqa: BLE001 - stderr may be closed; the job goes on
        pass


def _never_trains():
    """Return whether this interpreter never trains: a tracker of multiprocessing, or a compile worker."""
    words = " ".join(getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or [])
    return any(
        w in words for w in ("multiprocessing.resource_tracker", "multiprocessing.semaphore_tracker", "compile_worker")
    )


def _hello(run, line):
    """Append a line to this host's notes: that of an interpreter shows the supervisor that this hook was reached."""
    host = os.uname().nodename
    folder, many = os.path.join(run, "hosts", host), os.path.join(run, "many-hosts")
    if os.path.isdir(many):  # as in dlprof/run_folder.py
        import zlib

        folder = os.path.join(many, f"{zlib.crc32(host.encode()) % 64:02x}", host)
    os.makedirs(folder, exist_ok=True)
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123 - pathlib takes long to import
            boot = file.read(8)
    except OSError:
        boot = ""
    name = os.path.join(folder, f"notes-{boot}.jsonl")
    fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        os.write(fd, f'{{"log":"hello",{line}}}\n'.encode())
    finally:
        os.close(fd)


def _load_recorder(run):
    """Load the recorder that belongs to this file and let it hook into torch, which has just been imported."""
    try:
        _hello(run, f'"pid": {os.getpid()}, "torch": true')
        if "dlprof" not in sys.modules:
            # By its path, not by name: the script's interpreter may have no dlprof, or another version.
            import importlib.util

            package = os.path.abspath(__file__).rpartition(os.path.join("", "record", "inject", ""))[0]
            spec = importlib.util.spec_from_file_location(
                "dlprof", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
            )
            module = importlib.util.module_from_spec(spec)
            sys.modules["dlprof"] = module
            spec.loader.exec_module(module)
        from dlprof.record import collectors, hooks

        hooks.install(run, collectors.COLLECTORS, _CORES)
    except Exception as e:  # noqa: BLE001 - a recorder that cannot load costs the recording, never the job
        _say(e)


class _TorchFinder:
    """The first finder of the import system until torch has been imported. It finds no modules itself."""

    def __init__(self, run):
        self._run = run

    def find_spec(self, name, path=None, target=None):
        """For torch, return the spec of the other finders, and load the recorder once torch is imported."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader):
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module):
            # Restore the loader before other code can see the change.
            del loader.exec_module
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _load_recorder(self._run)

        try:
            loader.exec_module = exec_module
        except Exception as e:  # noqa: BLE001 - a loader that accepts no attributes: not recorded
            _say(e)


def _wrap_exec(run):
    """Make a script that replaces itself by another program write its recording, and a line about that, before."""

    def wrapped(original):
        def call(*args, **kwargs):
            try:
                _hello(run, f'"pid": {os.getpid()}, "exec": true')
                recorder = getattr(sys.modules.get("dlprof.marks"), "recorder", None)
                if recorder is not None:
                    recorder.stop("exec")
            except Exception as e:  # noqa: BLE001 - see the file's docstring
                _say(e)
            return original(*args, **kwargs)

        call.__name__, call.__doc__, call.__wrapped__ = original.__name__, original.__doc__, original
        return call

    # All other functions of the family call one of these two.
    os.execv, os.execve = wrapped(os.execv), wrapped(os.execve)


def _keep_environment(text):
    """Set the variables of --set, which a launcher may have changed, and keep their values if the script sets them."""
    import json

    kept = {name[4:]: value for name, value in json.loads(text)["set"].items() if name.startswith("env.")}
    if not kept:
        return
    changed = []  # for the recorder, the other values: variable, value, and the file, line and function that set it
    setting = type(os.environ).__setitem__

    def keep(self, name, value):
        if self is os.environ and name in kept and isinstance(value, str) and len(changed) < 16:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
                frame = frame.f_back  # from os.environ.update()
            changed.append((name, value, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        setting(self, name, kept.get(name, value) if self is os.environ else value)

    for name, value in kept.items():
        if os.environ.get(name) != value:
            changed.append((name, os.environ.get(name), None, 0, None))
            os.environ[name] = value
    keep.changed = changed
    type(os.environ).__setitem__ = keep


def _install():
    run = os.environ.get("DLPROF_RUN")
    # If sitecustomize is imported again, this file runs again; two finders would call each other for torch forever.
    if not run or _never_trains() or hasattr(os.execv, "__wrapped__"):
        return
    try:
        if os.environ.get("DLPROF_SET"):
            _keep_environment(os.environ["DLPROF_SET"])
        _hello(run, f'"pid": {os.getpid()}, "python": "{sys.version.split()[0]}"')
        if "torch" in sys.modules:
            _load_recorder(run)
        else:
            sys.meta_path.insert(0, _TorchFinder(run))
        _wrap_exec(run)
    except Exception as e:  # noqa: BLE001 - see the file's docstring
        _say(e)


def _shadowed():
    """Run the sitecustomize that Python would have found without this one.

    It may in turn run the next one on the path, as agents of tracing services do, so this folder is off the path then.
    """
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    ours = [(at, p) for at, p in enumerate(sys.path) if os.path.abspath(p or ".") == here]
    for _, p in ours:
        sys.path.remove(p)
    try:
        spec = PathFinder.find_spec("sitecustomize")
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            sys.modules["sitecustomize"] = module
            # Not guarded: Python reports its errors as usual.
            spec.loader.exec_module(module)
    finally:
        for at, p in ours:
            sys.path.insert(at, p)


_install()
_shadowed()
