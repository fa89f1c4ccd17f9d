"""`dlprof doctor`: what can be measured on this machine, and what prevents the rest."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from dlprof import cupti
from dlprof.commands import configured, form
from dlprof.errors import DlprofError
from dlprof.plain import plain
from dlprof.record.device import relay
from dlprof.record.launch.supervisor import recorded
from dlprof.record.ranks import hellos
from dlprof.run_folder import in_hosts

# Importing torch from a busy network disk can take this long.
_PATIENCE_S = 120.0
# SLURM's commands retry for a minute if the controller is down.
_SCHEDULER_S = 5.0

# Enough for the traces of a window and a day's step log of a rank (README: below 50 MB an hour outside the window).
_ENOUGH_BYTES = 2 << 30


@dataclass(frozen=True)
class Check:
    """One source of measurements: whether it works here, what was found, and what to do where it does not."""

    source: str
    works: bool
    found: str
    remedy: str = ""


class _Answer(Exception):  # noqa: N818 - an answer
    """What was found, and a remedy. Raised mostly for a source that does not work."""

    def __init__(self, found: str, remedy: str = "", *, works: bool = False) -> None:
        super().__init__(found)
        self.found, self.remedy, self.works = found, remedy, works


def _checks(source: str) -> Callable[[Callable[[], str]], Callable[[], Check]]:
    """Turn a function that returns what it found, or raises _Answer, into a check."""

    def made(function: Callable[[], str]) -> Callable[[], Check]:
        def check() -> Check:
            try:
                return Check(source, True, function())
            except _Answer as e:
                return Check(source, e.works, e.found, e.remedy)

        return check

    return made


@click.command(short_help="Check what can be measured on this machine.")
@form
def doctor(form: str) -> None:
    """Try every source of measurements on this machine, and show what prevents those that do not work.

    Nothing is recorded or changed. Run it where the job runs: in its container, its environment, on its node.
    """
    checks = []
    for check in CHECKS:
        checks.append(check())
        if form == "text":
            click.echo(_text(checks[-1]))
    if form == "json":
        click.echo(json.dumps({"format": 1, "checks": [asdict(check) for check in checks]}))


def _text(check: Check) -> str:
    line = f"{'yes' if check.works else 'no':<4}{check.source:<17}{plain(check.found)}"
    return line + (f"\n{'':<21}→ {check.remedy}" if check.remedy else "")


@_checks("recorder")
def _hook() -> str:
    """Start Python as a job would, and check that it loads the recorder."""
    failing = f"does not get into {sys.executable}: "
    remedy = "start the job's Python without -I, -E and -S, and leave PYTHONPATH and DLPROF_RUN to its processes"
    with tempfile.TemporaryDirectory() as folder:
        env = recorded({k: v for k, v in os.environ.items() if k != "DLPROF_RUN"}, Path(folder))
        done = _run([sys.executable, "-c", "pass"], failing, remedy, env=env)
        if any(hellos(host) for host in in_hosts(Path(folder))):
            return f"gets into {sys.executable}"
    raise _Answer(failing + _last_line(done), remedy)


_ABOUT_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": str(torch.__version__),
    "built": torch.version.cuda or torch.version.hip,
    "hip": torch.version.hip,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "traces": sorted(a.name for a in torch.profiler.supported_activities()),
}))
"""


@functools.cache
def _ask_torch() -> dict[str, Any] | str:
    """Query torch in a process of its own. Return its build, GPUs and activities, or the reason why that failed."""
    try:
        about: dict[str, Any] = json.loads(_output([sys.executable, "-c", _ABOUT_TORCH]).splitlines()[-1])
    except _Answer as e:
        return e.found
    except (ValueError, IndexError):
        return "no answer that can be read"
    return about


@_checks("torch")
def _torch() -> str:
    about = _ask_torch()
    if isinstance(about, str):
        raise _Answer(about, f"{sys.executable} -m pip install torch, or run dlprof with the job's Python")
    if about["gpus"]:
        return f"{about['torch']}, sees {len(about['gpus'])} × {about['gpus'][0]}"
    if not about["built"]:
        return f"{about['torch']}, built for the CPU only"
    remedy = "if there is one: nvidia-smi shows whether the driver works, CUDA_VISIBLE_DEVICES whether it is hidden"
    raise _Answer(f"{about['torch']}, built for GPUs and sees none", remedy, works=True)


# Does what a job's trace window does, on the first GPU. CUDA is initialised before the window, as in a job.
_ONE_KERNEL = """
import json, torch
from torch.profiler import ProfilerActivity, profile
ones = torch.ones(1024, device="cuda")
torch.cuda.synchronize()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    ones + 1
    torch.cuda.synchronize()
events = profiler.profiler.kineto_results.events()
print(json.dumps({"on_device": sum(e.device_type() == torch.autograd.DeviceType.CUDA for e in events)}))
"""


@_checks("torch.profiler")
def _trace() -> str:
    """Profile one kernel if torch sees a GPU. Only this shows what CUPTI refuses."""
    about = _ask_torch()
    if isinstance(about, str):
        raise _Answer("needs torch")
    if not about["gpus"]:
        return "traces operators on the CPU"
    if "CUDA" not in about["traces"]:
        found = "traces operators on the CPU, and no work on the GPU: this torch has no CUPTI"
        raise _Answer(found, "install a build of torch with Kineto and CUPTI, as the official ones are")
    # At this level Kineto also logs calls of CUPTI that fail; see dlprof/record/device/kineto.py.
    env = os.environ | {"KINETO_LOG_LEVEL": "2"}
    done = _run([sys.executable, "-c", _ONE_KERNEL], "one kernel was to be profiled: ", env=env)
    errors = cupti.short(
        line
        for line in done.stderr.splitlines()
        if (message := relay.MESSAGE.match(line.encode())) and message[1] in relay.KEPT_LEVELS
    )
    remedy = cupti.remedy(errors) or (
        cupti.remedy(["CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"])
        if _admins_only()
        else "run nothing else that profiles: nsys, ncu, dcgm, a debugger; CUDA_INJECTION64_PATH must be unset"
    )
    try:
        events = int(json.loads(done.stdout.splitlines()[-1])["on_device"])
    except (ValueError, IndexError, KeyError, TypeError):
        raise _Answer(f"one kernel could not be profiled: {_last_line(done)}", remedy) from None
    lost = cupti.loss(errors)
    if events and lost is None:
        return "traces operators, and work on the GPU: one kernel was profiled"
    what = "something is missing" if events else "no event of it came"
    raise _Answer(f"profiled one kernel, and {what}: {lost or 'without an error message'}", remedy)


def _admins_only() -> bool:
    """Return whether NVIDIA's driver lets only administrators profile; False if unknown."""
    return "RmProfilingAdminOnly: 1" in _file("/proc/driver/nvidia/params")


def _gpu() -> Check:
    """Try the library that samples GPUs: amdsmi if torch is built for AMD, else NVML."""
    about = _ask_torch()
    return _amdsmi() if not isinstance(about, str) and about["hip"] else _nvml()


@_checks("amdsmi")
def _amdsmi() -> str:
    code = "import amdsmi; amdsmi.amdsmi_init(); print(amdsmi.__version__)"
    remedy = "install amdsmi of this machine's ROCm (/opt/rocm/share/amd_smi), into the Python that runs dlprof"
    return f"amdsmi {_output([sys.executable, '-c', code], 'no GPU is sampled: ', remedy).strip()}"


@_checks("NVML")
def _nvml() -> str:
    pynvml = _module("pynvml", "nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as e:
        remedy = "if there is a GPU: nvidia-smi must work where the job runs (in a container: start it with --gpus all)"
        raise _Answer(f"no GPU is sampled: {e}", remedy) from None
    try:
        gpm = count and pynvml.nvmlGpmQueryDeviceSupport(pynvml.nvmlDeviceGetHandleByIndex(0)).isSupportedDevice
    except pynvml.NVMLError:
        gpm = False
    found = f"{count} GPUs, driver {driver}{'' if gpm else '; SM and tensor activity need Hopper or later'}"
    if not count:
        raise _Answer(found)
    return found


@_checks("host")
def _host() -> str:
    psutil = _module("psutil", "psutil")
    cores, allowed = psutil.cpu_count() or 0, len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    mine = f", {allowed} of them for us" if allowed < cores else ""
    return f"{cores} cores{mine}, {memory:.0f} GiB of memory (psutil {_version('psutil')})"


@_checks("loader")
def _loader() -> str:
    """Check what a loader worker can read about itself from the kernel. The times of batches need nothing."""
    wanted = {"waiting for a core": "/proc/thread-self/schedstat", "bytes read": "/proc/self/io"}
    silent = [what for what, path in wanted.items() if not os.access(path, os.R_OK)]
    found = "waits, fetches and CPU time of every batch; "
    if not silent:
        return found + "the kernel counts waiting for cores and bytes read"
    remedy = "what more workers give is then predicted as if nothing had waited for a core"
    raise _Answer(f"{found}the kernel counts no {' and no '.join(silent)}", remedy, works=True)


@_checks("stacks")
def _stacks() -> str:
    """Read the stack of a process from another one that is not its parent, as the sampler does."""
    from dlprof.record.samplers.stacks import find

    command = find()
    if command is None:
        raise _not_installed("py-spy")
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as target:
        assert target.stdin is not None
        assert target.stdout is not None
        target.stdout.readline()
        try:
            dump = [command, "dump", "--pid", str(target.pid)]
            _output(dump, "py-spy may not read other processes: ", _ptrace_remedy())
        finally:
            target.stdin.close()
    return f"py-spy {_version('py-spy')} may read the processes of this user"


_WAITS_S = 5.0


@_checks("attach --inject")
def _inject() -> str:
    """Have a process that runs execute a line of ours, as the recorder gets into a job."""
    from dlprof.live.inject import hand_over

    code = "import sys, time; print(flush=True)\nwhile True: time.sleep(0.01)"
    with tempfile.TemporaryDirectory() as name:
        script, answer = Path(name, "enter.py"), Path(name, "entered")
        script.write_text(f"open({str(answer)!r}, 'x').close()")
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as target:
            assert target.stdout is not None
            target.stdout.readline()
            try:
                refused = hand_over(target.pid, script)
                until = time.monotonic() + _WAITS_S
                while not (refused or answer.exists()) and time.monotonic() < until:
                    time.sleep(0.02)
            finally:
                target.kill()
        if not answer.exists():
            remedy = "apt install gdb" if shutil.which("gdb") is None else _ptrace_remedy()
            raise _Answer(
                f"does not get into a process that runs: {refused or f'it ran nothing of ours within {_WAITS_S:g} s'}",
                remedy,
            )
    return f"gets into processes that run, by {'gdb' if sys.version_info < (3, 14) else 'sys.remote_exec'}"


def _ptrace_remedy() -> str:
    from dlprof.live.inject import ptrace_scope

    level, able = ptrace_scope()
    if level == 3:
        return "kernel.yama.ptrace_scope is 3: nobody may, until this machine boots with another value"
    if level and not able:
        return f"sudo sysctl kernel.yama.ptrace_scope=0 (it is {level}), or run the job with the capability SYS_PTRACE"
    return "in a container: start it with --cap-add SYS_PTRACE, and a seccomp profile that lets ptrace through"


@_checks("lines")
def _lines() -> str:
    if not (version := _version("line_profiler")):
        raise _not_installed("line_profiler")
    return f"line_profiler {version}"


@_checks("nsys")
def _nsys() -> str:
    command = shutil.which("nsys")
    if command is None:
        raise _Answer("not on the PATH", "install NVIDIA Nsight Systems, or add its bin folder to the PATH")
    return f"{command}: {_output([command, '--version'], f'{command} does not start: ').strip()}"


@_checks("SLURM")
def _slurm() -> str:
    command = shutil.which("srun")
    if command is None:
        raise _Answer("srun is not on the PATH: jobs start without it here")
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, timeout=_SCHEDULER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode or b"UP" not in done.stdout:
        raise _Answer(f"{command}, whose controller does not answer", "SLURM_CONF names another slurm.conf")
    job = os.environ.get("SLURM_JOB_ID")
    return f"{command}, {f'in job {job}' if job else 'not in a job'}"


@_checks("disk")
def _disk() -> str:
    """Write a temporary file where a run would be."""
    place = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"dlprof")
    except OSError as e:
        raise _Answer(f"no run can be written below {place.absolute()}: {e}", "-o names another folder") from None
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GiB free below {place.absolute()}"
    if free < _ENOUGH_BYTES:
        raise _Answer(found, "-o names a folder with more space", works=True)
    return found


@_checks("pyproject.toml")
def _config() -> str:
    try:
        path, table = configured.found()
        for name in table:
            configured.defaults(name)
    except DlprofError as e:
        raise _Answer(str(e), f"mend it, or set {configured.CONFIG}= to read no file") from None
    return f"{path} sets options of {', '.join(table)}" if table else "no [tool.dlprof] here or above sets options"


# Every source, in the order of the report. To add a source: its check, its name here.
CHECKS = (_hook, _torch, _trace, _gpu, _host, _loader, _stacks, _inject, _lines, _nsys, _slurm, _disk, _config)


def _not_installed(package: str) -> _Answer:
    return _Answer(f"{package} is not installed", f"pip install {package}, into the Python that runs dlprof")


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise _not_installed(package) from None


def _file(path: str) -> str:
    """Return the text of a kernel file such as /proc/..., "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str:
    from importlib import metadata  # imports all of email, which no other command needs

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _run(command: list[str], failing: str = "", remedy: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. If it does not start or end, raise _Answer with a text that begins with `failing`."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S, **more
        )
    except subprocess.TimeoutExpired:
        raise _Answer(f"{failing}no answer within {_PATIENCE_S:.0f} s", remedy) from None
    except OSError as e:
        raise _Answer(f"{failing}{e}", remedy) from None


def _output(command: list[str], failing: str = "", remedy: str = "") -> str:
    """Return a command's output; raise _Answer if it fails."""
    done = _run(command, failing, remedy)
    if done.returncode:
        raise _Answer(failing + _last_line(done), remedy)
    return done.stdout


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1][:200] if lines else f"it ended with status {done.returncode}"
