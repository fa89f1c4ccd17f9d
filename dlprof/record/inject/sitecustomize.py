"""Gets the recorder into every Python of a watched job without touching the script.

The supervisor puts this folder first on PYTHONPATH, so Python imports this file as it starts. It leaves word that it
was here, waits until somebody imports torch, and loads the recorder then. It then hands over to the sitecustomize that
it shadows. It uses the standard library only, runs on Python 3.8 and later, and never fails a script.
"""

# Every interpreter of the job runs this as it starts, and pathlib and contextlib would cost it milliseconds.
# ruff: noqa: PTH100, PTH103, PTH112, PTH118, PTH120, SIM105

import os
import sys


def _say(error):
    """Tell the user, in one line, that this process is not recorded."""
    try:
        sys.stderr.write(f"dlprof: {type(error).__name__}: {error}; the job goes on without it\n")
    except Exception:  # noqa: BLE001 - stderr may be closed; the job goes on
        pass


def _unwatched():
    """Return whether this interpreter is one that never trains: a tracker of multiprocessing or a compiler's worker."""
    words = " ".join(getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or [])
    return any(
        w in words for w in ("multiprocessing.resource_tracker", "multiprocessing.semaphore_tracker", "compile_worker")
    )


def _hello(run, line):
    """Append a line to this host's list of interpreters, from which the supervisor knows whether we got in."""
    host = os.uname().nodename
    folder, many = os.path.join(run, "hosts", host), os.path.join(run, "many-hosts")
    if os.path.isdir(many):  # as dlprof/run_folder.py has it
        import zlib

        folder = os.path.join(many, f"{zlib.crc32(host.encode()) % 64:02x}", host)
    os.makedirs(folder, exist_ok=True)
    fd = os.open(os.path.join(folder, "hello.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def _load_recorder(run):
    """Load the recorder that belongs to this file and let it watch torch, which has just been imported."""
    try:
        _hello(run, f'{{"pid": {os.getpid()}, "torch": true}}\n')
        if "dlprof" not in sys.modules:
            # By its place, not by name: the script's interpreter may have no dlprof, or another one.
            import importlib.util

            package = os.path.abspath(__file__).rpartition(os.path.join("", "record", "inject", ""))[0]
            spec = importlib.util.spec_from_file_location(
                "dlprof", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
            )
            module = importlib.util.module_from_spec(spec)
            sys.modules["dlprof"] = module
            spec.loader.exec_module(module)
        from dlprof.record import collectors, hooks

        hooks.install(run, collectors.COLLECTORS)
    except Exception as e:  # noqa: BLE001 - a recorder that cannot load costs the recording, never the job
        _say(e)


class _TorchFinder:
    """Stands first among the import system's finders until torch has been imported, and finds nothing itself."""

    def __init__(self, run):
        self._run = run

    def find_spec(self, name, path=None, target=None):
        """Return what the other finders give; for torch, see to it that we are called once it has run."""
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
            # The loader is as it was before anybody's code can look at it.
            del loader.exec_module
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _load_recorder(self._run)

        try:
            loader.exec_module = exec_module
        except Exception as e:  # noqa: BLE001 - a loader that takes no attributes: not recorded
            _say(e)


def _watch_exec(run):
    """See to it that a script that replaces itself by another program leaves its recording, and word of that."""

    def watched(original):
        def call(*args, **kwargs):
            try:
                _hello(run, f'{{"pid": {os.getpid()}, "exec": true}}\n')
                recorder = getattr(sys.modules.get("dlprof.marks"), "recorder", None)
                if recorder is not None:
                    recorder.stop("exec")
            except Exception as e:  # noqa: BLE001 - see the file's docstring
                _say(e)
            return original(*args, **kwargs)

        call.__name__, call.__doc__, call.__wrapped__ = original.__name__, original.__doc__, original
        return call

    # All others of the family call one of these two.
    os.execv, os.execve = watched(os.execv), watched(os.execve)


def _keep_environment(text):
    """Set the variables that --set names, which a launcher may have changed, and keep them if the script sets them."""
    import json

    kept = {name[4:]: value for name, value in json.loads(text)["set"].items() if name.startswith("env.")}
    if not kept:
        return
    changed = []  # what did not hold: variable, value, and the file, line and function that set it; for the recorder
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


def _watch():
    run = os.environ.get("DLPROF_RUN")
    # Whoever imports sitecustomize again gets this file again; two finders would ask each other for torch for ever.
    if not run or _unwatched() or hasattr(os.execv, "__wrapped__"):
        return
    try:
        if os.environ.get("DLPROF_SET"):
            _keep_environment(os.environ["DLPROF_SET"])
        _hello(run, f'{{"pid": {os.getpid()}, "python": "{sys.version.split()[0]}"}}\n')
        if "torch" in sys.modules:
            _load_recorder(run)
        else:
            sys.meta_path.insert(0, _TorchFinder(run))
        _watch_exec(run)
    except Exception as e:  # noqa: BLE001 - see the file's docstring
        _say(e)


def _shadowed():
    """Run the sitecustomize that Python would have found without us, in our place.

    It may run the next one on the path in turn, as agents of tracing services do: meanwhile we are not on the path.
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
            # Not guarded: what goes wrong in it, Python reports as it always does.
            spec.loader.exec_module(module)
    finally:
        for at, p in ours:
            sys.path.insert(at, p)


_watch()
_shadowed()
