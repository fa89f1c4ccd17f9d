"""`dlprof doctor`: what can be measured on this machine, and what is in the way of the rest."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from dlprof import cupti
from dlprof.commands import form
from dlprof.record.device import relay
from dlprof.record.launch.supervisor import recorded

# An import of torch from a busy network disk takes its time.
_PATIENCE_S = 120.0

# A window's traces and the light layer of a day, a rank (README: below 50 MB an hour outside the window).
_ENOUGH_BYTES = 2 << 30

_CAP_SYS_PTRACE = 19  # <linux/capability.h>


@dataclass(frozen=True)
class Check:
    """One source of measurements: whether it works here, what was found, and what to do where it does not."""

    source: str
    works: bool
    found: str
    remedy: str = ""


@click.command(short_help="Tell what can be measured on this machine.")
@form
def doctor(form: str) -> None:
    """Try every source of measurements on this machine, and say what is in the way of those that do not work.

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
    line = f"{'yes' if check.works else 'no':<4}{check.source:<17}{check.found}"
    return line + (f"\n{'':<21}→ {check.remedy}" if check.remedy else "")


def _hook() -> Check:
    """Start a Python as a job would be, and see whether it finds us."""
    with tempfile.TemporaryDirectory() as folder:
        env = recorded({k: v for k, v in os.environ.items() if k != "DLPROF_RUN"}, Path(folder))
        done = _run([sys.executable, "-c", "pass"], env=env)
        if any(Path(folder).glob("hosts/*/hello.jsonl")):
            return Check("recorder", True, f"gets into {sys.executable}")
    said = done if isinstance(done, str) else _last_line(done)
    return Check(
        "recorder",
        False,
        f"does not get into {sys.executable}{': ' if said else ''}{said}",
        "start the job's Python without -I, -E and -S, and leave PYTHONPATH and DLPROF_RUN to its processes",
    )


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
    """Ask torch about itself, in a process of its own; what went wrong, in words, where it cannot answer."""
    done = _run([sys.executable, "-c", _ABOUT_TORCH])
    if isinstance(done, str):
        return done
    try:
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return _last_line(done)
    return told


def _torch() -> Check:
    told = _ask_torch()
    if isinstance(told, str):
        return Check(
            "torch", False, told, f"{sys.executable} -m pip install torch, or run dlprof with the job's Python"
        )
    if told["gpus"]:
        return Check("torch", True, f"{told['torch']}, sees {len(told['gpus'])} × {told['gpus'][0]}")
    if not told["built"]:
        return Check("torch", True, f"{told['torch']}, built for the CPU only")
    return Check(
        "torch",
        True,
        f"{told['torch']}, built for GPUs and sees none",
        "if there is one: nvidia-smi tells whether the driver works, CUDA_VISIBLE_DEVICES whether it is hidden",
    )


# What a job's window does, on the first GPU. CUDA is woken before, as it is there.
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


def _trace() -> Check:
    """Profile one kernel where torch sees a GPU: what CUPTI refuses shows only then."""
    told = _ask_torch()
    if isinstance(told, str):
        return Check("torch.profiler", False, "needs torch", "")
    if not told["gpus"]:
        return Check("torch.profiler", True, "traces operators on the CPU")
    if "CUDA" not in told["traces"]:
        return Check(
            "torch.profiler",
            False,
            "traces operators on the CPU, and no work on the GPU: this torch has no CUPTI",
            "install a build of torch with Kineto and CUPTI, as the official ones are",
        )
    # At this level Kineto also tells of calls of CUPTI that fail; see kineto.py.
    done = _run([sys.executable, "-c", _ONE_KERNEL], env=os.environ | {"KINETO_LOG_LEVEL": "2"})
    if isinstance(done, str):
        return Check("torch.profiler", False, f"one kernel was to be profiled: {done}", "")
    said = cupti.short(
        line
        for line in done.stderr.splitlines()
        if (found := relay.MESSAGE.match(line.encode())) and found[1] in relay.KEPT_LEVELS
    )
    try:
        events = int(json.loads(done.stdout.splitlines()[-1])["on_device"])
    except (ValueError, IndexError, KeyError, TypeError):
        return Check("torch.profiler", False, f"one kernel could not be profiled: {_last_line(done)}", _remedy(said))
    lost = cupti.loss(said)
    if events and lost is None:
        return Check("torch.profiler", True, "traces operators, and work on the GPU: one kernel was profiled")
    what = "no event of it came" if not events else "something is missing"
    return Check("torch.profiler", False, f"profiled one kernel, and {what}: {lost or 'without a word'}", _remedy(said))


def _remedy(said: list[str]) -> str:
    known = cupti.remedy(said)
    if known or not _admins_only():
        return (
            known or "run nothing else that profiles: nsys, ncu, dcgm, a debugger; CUDA_INJECTION64_PATH must be unset"
        )
    return cupti.remedy(["CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"])


def _admins_only() -> bool:
    """Return whether NVIDIA's driver lets only administrators profile; False where nobody tells."""
    try:
        params = Path("/proc/driver/nvidia/params").read_text()
    except OSError:
        return False
    return "RmProfilingAdminOnly: 1" in params


def _gpu() -> Check:
    """See what tells of GPUs: NVML, or amdsmi where torch is built for AMD's."""
    told = _ask_torch()
    return _amdsmi() if not isinstance(told, str) and told["hip"] else _nvml()


def _amdsmi() -> Check:
    done = _run([sys.executable, "-c", "import amdsmi; amdsmi.amdsmi_init(); print(amdsmi.__version__)"])
    if not isinstance(done, str) and done.returncode == 0:
        return Check("amdsmi", True, f"amdsmi {done.stdout.split()[-1] if done.stdout.split() else ''}")
    said = done if isinstance(done, str) else _last_line(done)
    return Check(
        "amdsmi",
        False,
        f"{said}: no GPU is sampled",
        "install amdsmi of this machine's ROCm (/opt/rocm/share/amd_smi), into the Python that runs dlprof",
    )


def _nvml() -> Check:
    try:
        import pynvml
    except ImportError:
        return Check("NVML", False, "nvidia-ml-py is not installed", _install("nvidia-ml-py"))
    try:
        pynvml.nvmlInit()
        count, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
        gpm = count and _has_activity(pynvml)
    except pynvml.NVMLError as e:
        return Check(
            "NVML",
            False,
            f"{e}: no GPU is sampled",
            "if there is a GPU: nvidia-smi must work where the job runs (in a container: start it with --gpus all)",
        )
    activity = "" if gpm else "; SM and tensor activity need Hopper or later"
    return Check("NVML", bool(count), f"{count} GPUs, driver {driver}{activity}")


def _has_activity(nvml: Any) -> bool:
    try:
        support = nvml.nvmlGpmQueryDeviceSupport(nvml.nvmlDeviceGetHandleByIndex(0))
    except nvml.NVMLError:
        return False
    return bool(support.isSupportedDevice)


def _host() -> Check:
    try:
        import psutil
    except ImportError:
        return Check("host", False, "psutil is not installed", _install("psutil"))
    cores, allowed = psutil.cpu_count() or 0, len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    mine = f", {allowed} of them for us" if allowed < cores else ""
    return Check("host", True, f"{cores} cores{mine}, {memory:.0f} GiB of memory (psutil {_version('psutil')})")


def _loader() -> Check:
    """See what the kernel tells a loader worker of itself; the times of batches need nothing."""
    wanted = {"waiting for a core": "/proc/thread-self/schedstat", "bytes read": "/proc/self/io"}
    silent = [what for what, path in wanted.items() if not os.access(path, os.R_OK)]
    found = "waits, fetches and CPU time of every batch; " + (
        f"the kernel tells no {' and no '.join(silent)}"
        if silent
        else "the kernel tells waiting for cores and bytes read"
    )
    remedy = "what more workers give is then predicted as if nothing had waited for a core" if silent else ""
    return Check("loader", True, found, remedy)


def _stacks() -> Check:
    """Look at the stack of a process of ours, as is done beside a job: the reader is not the process's parent."""
    beside = Path(sys.executable).parent / "py-spy"
    command = str(beside) if beside.is_file() else shutil.which("py-spy")
    if command is None:
        return Check("stacks", False, "py-spy is not installed", _install("py-spy"))
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as target:
        assert target.stdout is not None
        target.stdout.readline()
        done = _run([command, "dump", "--pid", str(target.pid)])
        if target.stdin is not None:
            target.stdin.close()
    if not isinstance(done, str) and done.returncode == 0:
        return Check("stacks", True, f"py-spy {_version('py-spy')} may read the processes of this user")
    said = done if isinstance(done, str) else _last_line(done)
    return Check("stacks", False, f"py-spy may not read other processes: {said}", _ptrace_remedy())


def _ptrace_remedy() -> str:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    try:
        level = int(scope.read_text())
    except (OSError, ValueError):
        level = 0
    if level == 3:
        return "kernel.yama.ptrace_scope is 3: nobody may, until this machine boots with another value"
    if level and not _may_ptrace():
        return f"sudo sysctl kernel.yama.ptrace_scope=0 (it is {level}), or run the job with the capability SYS_PTRACE"
    return "in a container: start it with --cap-add SYS_PTRACE, and a seccomp profile that lets ptrace through"


def _may_ptrace() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_SYS_PTRACE & 1)
    return False


def _lines() -> Check:
    version = _version("line_profiler")
    if version:
        return Check("lines", True, f"line_profiler {version}")
    return Check("lines", False, "line_profiler is not installed", _install("line_profiler"))


def _nsys() -> Check:
    command = shutil.which("nsys")
    if command is None:
        return Check(
            "nsys", False, "not on the PATH", "install NVIDIA Nsight Systems, or add its bin folder to the PATH"
        )
    done = _run([command, "--version"])
    if isinstance(done, str) or done.returncode:
        said = done if isinstance(done, str) else _last_line(done)
        return Check("nsys", False, f"{command} does not start: {said}", "")
    return Check("nsys", True, f"{command}: {done.stdout.strip()}")


def _slurm() -> Check:
    command = shutil.which("srun")
    if command is None:
        return Check("SLURM", False, "srun is not on the PATH: jobs start without it here")
    job = os.environ.get("SLURM_JOB_ID")
    return Check("SLURM", True, f"{command}, {f'in job {job}' if job else 'not in a job'}")


def _disk() -> Check:
    """Write where a run would be, and remove it."""
    place = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"dlprof")
    except OSError as e:
        return Check("disk", False, f"no run can be written below {place.absolute()}: {e}", "-o names another folder")
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GiB free below {place.absolute()}"
    return Check("disk", True, found, "" if free > _ENOUGH_BYTES else "-o names a folder with more space")


# Every source and what it stands on, in the order of the report. To add a source: its check, its line here.
CHECKS: tuple[Callable[[], Check], ...] = (
    _hook,
    _torch,
    _trace,
    _gpu,
    _host,
    _loader,
    _stacks,
    _lines,
    _nsys,
    _slurm,
    _disk,
)


def _install(package: str) -> str:
    return f"pip install {package}, into the Python that runs dlprof"


def _version(package: str) -> str:
    from importlib import metadata  # with all of email, which no other command needs

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str] | str:
    """Run a command to its end; what went wrong, in words, where it does not start or end."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S, **more
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE_S:.0f} s"
    except OSError as e:
        return str(e)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1][:200] if lines else f"it ended with status {done.returncode}"
