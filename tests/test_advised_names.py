"""What manuals, remedies and settings call by name is there in the libraries that are installed, and not deprecated.

Names are found in code, between backticks: what is called, with its keywords; what stands after a dot; keywords alone.
Names of older versions are passed over where the text says so: before torch 2.13 `broadcast_buffers=False`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.rules import RULES
from tests.fixtures.jobs import launch
from tests.fixtures.places import ROOT

pytest.importorskip("torch", minversion="2.13", reason="names are those of torch 2.13")

LIBRARIES = """torch numpy pandas transformers torchvision torchaudio torchdata torch_geometric gymnasium datasets timm
lightning stable_baselines3 monai
gc warnings multiprocessing tracemalloc faulthandler time os logging sys gzip resource copy"""
SHORT = {"np": "numpy", "pd": "pandas", "nn": "torch.nn", "F": "torch.nn.functional"}
# Where a name that stands alone is looked for, and the classes of what has a method called.
HOMES = """builtins torch torch.nn torch.nn.functional torch.nn.parallel torch.nn.utils torch.nn.utils.rnn
torch.nn.attention torch.amp torch.optim torch.optim.lr_scheduler torch.optim.swa_utils torch.autograd torch.utils.data
torch.cuda torch.cuda.memory torch.distributed torch.distributed.fsdp torch.distributed.checkpoint
torch.distributed.tensor.parallel torch.distributed.algorithms.ddp_comm_hooks.default_hooks
torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook torchdata.stateful_dataloader"""
CLASSES = """torch.Tensor torch.nn.Module torch.nn.parallel.DistributedDataParallel torch.optim.Optimizer
torch.amp.GradScaler torch.nn.DataParallel torch.utils.data.DataLoader numpy.ndarray numpy.random.Generator
pandas.DataFrame pandas.core.groupby.DataFrameGroupBy PIL.Image.Image logging.Logger io.TextIOWrapper threading.Event
resource.struct_rusage torch.distributed.fsdp.FSDPModule"""
# What a keyword that stands alone may be of.
TAKERS = """torch.utils.data.DataLoader torch.nn.parallel.DistributedDataParallel torch.optim.AdamW torch.compile
torch.amp.GradScaler torch.distributed.fsdp.fully_shard torch.nn.Embedding torch.nn.MultiheadAttention torch.Tensor.to
torch.profiler.profile torch.Tensor.backward torch.distributed.pipelining.ScheduleGPipe numpy.load numpy.array
gzip.open"""
# What is written without the library that it is of, or without what takes it.
WHOLE = {
    "SDPBackend.FLASH_ATTENTION": "torch.nn.attention.SDPBackend.FLASH_ATTENTION",
    "need_weights=": "torch.nn.MultiheadAttention.forward",
    "DataCollatorWithPadding": "transformers.DataCollatorWithPadding",
    "LengthGroupedSampler": "transformers.trainer_pt_utils.LengthGroupedSampler",
    "ModelEmaV3": "timm.utils.ModelEmaV3",
    "TrainingArguments": "transformers.TrainingArguments",
    "attn_implementation=": "transformers.PreTrainedModel.from_pretrained",
    "gradient_checkpointing=": "transformers.TrainingArguments",
    "pad_to_multiple_of=": "transformers.PreTrainedTokenizerBase.__call__",
    "padding=": "transformers.PreTrainedTokenizerBase.__call__",
    "packing=": "trl.SFTConfig",
    "train_sampling_strategy=": "transformers.TrainingArguments",
    "use_cache=": "transformers.GenerationConfig",
    "save_only_model=": "transformers.TrainingArguments",
    "Trainer": "transformers.Trainer",
    "ModelCheckpoint": "lightning.pytorch.callbacks.ModelCheckpoint",
    "monai.data.CacheDataset": "monai.data.CacheDataset",
    "Dataset": "torch.utils.data.Dataset",
    "PersistentDataset": "monai.data.PersistentDataset",
    "Decoder": "x_transformers.Decoder",
    "attn_flash=": "x_transformers.x_transformers.AttentionLayers",
    "log_interval=": "pytorch_forecasting.models.base_model.BaseModel",
    "DummyVecEnv": "stable_baselines3.common.vec_env.DummyVecEnv",
    "num_envs=": "gymnasium.make_vec",
    "vectorization_mode=": "gymnasium.make_vec",
    "dataset.map": "datasets.Dataset.map",
    "dataset.set_format": "datasets.Dataset.set_format",
}
# What only looks like a name of a library, and why.
NO_NAMES = {
    "Memory": "a field of what Kubernetes takes",
    "Socket": "a word of NCCL's log",
    "_.npy": "the ending of a file",
    "_.npz": "the ending of a file",
    "clocks.max.sm": "a field of nvidia-smi",
    "clocks.sm": "a field of nvidia-smi",
    "clocks_event_reasons.active": "a field of nvidia-smi",
    "cpu.stat": "a file of Linux",
    "info.id": "torch's WorkerInfo has it in its objects alone",
    "info.num_workers": "torch's WorkerInfo has it in its objects alone",
    "torch._foreach_*": "all that begin so",
    "torch._foreach_clamp_*": "all that begin so",
}

OLDER = re.compile(r"\bbefore (?:torch|version) [\d.]+\s(?:`[^`]*`(?: and )?)+")
OLD = re.compile(r"\.\. deprecated::|\bis deprecated\b|\(deprecated|: *\[?deprecated\b", re.IGNORECASE)
ABSENT = object()  # of a library that is not installed


@cache
def texts() -> list[tuple[str, str]]:
    """Return what dlprof may say, and where it stands: the manuals, and the strings of modules, docstrings aside."""
    return [*((rule.id, rule.manual) for rule in RULES), *strings()]


def strings() -> Iterator[tuple[str, str]]:
    """Yield the strings of modules that advise, docstrings aside, and the modules' names."""
    for path in sorted([*ROOT.glob("dlprof/analysis/**/*.py"), ROOT / "dlprof/overrides.py"]):
        tree = ast.parse(path.read_text())
        nodes = [*ast.walk(tree)]
        passed = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        passed |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                yield path.stem, "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
                yield path.stem, node.value


@cache
def find(name: str) -> Any:
    """Return what a dotted name stands for; None: there is no such thing; ABSENT: its library is not installed."""
    first, *words = name.split(".")
    try:
        found: Any = importlib.import_module(first)
    except (ImportError, OSError, RuntimeError):  # not there, or built for another torch
        return ABSENT
    for n, word in enumerate(words):
        if not hasattr(found, word):
            with suppress(ImportError):
                importlib.import_module(".".join((first, *words[: n + 1])))
        if not hasattr(found, word):
            return None
        found = getattr(found, word)
    return found


def meant(name: str) -> list[Any]:
    """Return all that a name as it is written may stand for; empty: nothing."""
    first, _, rest = name.partition(".")
    whole = WHOLE.get(name) or ".".join(filter(None, (SHORT.get(first, first), rest)))
    if whole.split(".")[0] in LIBRARIES.split():
        places = [whole]
    else:
        homes = CLASSES.split() if "." in name else [*HOMES.split(), *CLASSES.split()]
        places = [f"{home}.{name.rpartition('.')[2]}" for home in homes]
    return [found for place in places if (found := find(place)) is not None]


@cache
def is_old(found: Any) -> bool:
    """Return whether a library says that this is deprecated: by a decorator, or in its own words."""
    if not callable(found):
        return False
    doc, name = inspect.getdoc(found) or "", getattr(found, "__name__", "-")
    said = rf"^(\.\. |\[)?deprecated|\b{re.escape(name)}\W* is deprecated"
    marked = any(hasattr(one, "__deprecated__") for one in (found, getattr(found, "__init__", found)))
    return marked or re.search(said, doc, re.MULTILINE | re.IGNORECASE) is not None


def takes(taker: Any, keyword: str) -> bool | None:
    """Return whether something takes a keyword; None: it says that it is deprecated."""
    doc = "\n".join(inspect.getdoc(one) or "" for one in (taker, getattr(taker, "__init__", taker))) + "\n"
    try:
        parameters = inspect.signature(taker).parameters
        known = keyword in parameters or ("kwargs" in parameters and keyword in doc)
    except (TypeError, ValueError):  # written in C
        known = keyword in doc
    said = re.search(rf"^( *){keyword}\b[^\n:]*:.*\n(?:\1 +.*\n|\n)*", doc, re.MULTILINE)
    return None if known and said and OLD.search(said[0]) else known


def wrong(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a text uses and should not, and why."""
    for quoted in re.findall(r"`([^`]+)`", OLDER.sub("", re.sub(r"https?://\S+", "", text))):
        code = " ".join(quoted.split()).replace("…", "_")
        if re.match(r"[a-z_]\w*=[^ =]", code):
            code = f"_({code})"
        for whole in (code, f"_{code}", f"{code} pass", f"{code}\ndef f(): pass", re.sub(r"\bthe (\w+)", r"\1", code)):
            with suppress(SyntaxError):
                yield from in_code(ast.parse(whole))
                break
        else:
            if "torch." in code and quoted not in NO_NAMES:
                yield quoted, "cannot be read"


def in_code(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that code uses and should not, and why."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) or (
            isinstance(node, ast.Name) and (node in called or re.match(r"[A-Z]\w*[a-z]", node.id))
        ):
            name = written(node)
            found = meant(name)
            if not re.search(r"\b_$", name) and name not in NO_NAMES and all(is_old(one) for one in found):
                yield name, "deprecated" if found else "not there"
        if isinstance(node, ast.Call):
            name = written(node.func)
            for keyword in (one.arg for one in node.keywords if one.arg not in (None, "_")):
                alone = [WHOLE[f"{keyword}="]] if f"{keyword}=" in WHOLE else TAKERS.split()
                takers = [find(one) for one in alone] if name == "_" else meant(name)
                told = [takes(one, keyword) for one in takers if one not in (None, ABSENT)]
                if None in told or (True not in told and ABSENT not in takers):
                    yield f"{name}({keyword}=)", "deprecated" if None in told else "not there"


def written(node: ast.AST) -> str:
    """Return a name, with what is before its dots where that are names too: torch.cat, _.sum."""
    text = ast.unparse(node)
    if re.fullmatch(r"[\w.]+", text):
        return text
    return f"_.{node.attr}" if isinstance(node, ast.Attribute) else "_"


@pytest.mark.long
def test_what_is_advised_is_there_and_not_deprecated() -> None:
    found = {(*one, where) for where, text in texts() for one in wrong(text)}
    assert sorted(found) == []


def test_what_is_no_name_is_still_said() -> None:
    said = "\n".join(text for _, text in texts())
    assert [name for name in (*WHOLE, *NO_NAMES) if name.strip("_=") not in said] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("use `torch.nn.functional.layernorm(x)`", [("torch.nn.functional.layernorm", "not there")]),
        ("a `DistributedSampler` or `nn.RMSNorms`", [("nn.RMSNorms", "not there")]),
        ("`loss.detached()`", [("loss.detached", "not there")]),
        ("`broadcast_buffers=False`", [("_(broadcast_buffers=)", "deprecated")]),
        (
            "`DistributedDataParallel(..., broadcast_buffers=False)`",
            [("DistributedDataParallel(broadcast_buffers=)", "deprecated")],
        ),
        ("`forward_sync_buffers=False` (before torch 2.13 `broadcast_buffers=False`)", []),
        ("`DataLoader(data, workers=2)`", [("DataLoader(workers=)", "not there")]),
        ("`torch.cuda.amp.GradScaler()`", [("torch.cuda.amp.GradScaler", "deprecated")]),
        ("`torch.nn.utils.clip_grad_norm(p, 1)`", [("torch.nn.utils.clip_grad_norm", "deprecated")]),
        ("`torch.norm(x)`", [("torch.norm", "deprecated")]),
        ("`torch.profiler.profile(use_cuda=True)`", [("torch.profiler.profile(use_cuda=)", "deprecated")]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_that_are_not_there_or_old_are_found(text: str, told: list[tuple[str, str]]) -> None:
    assert [*wrong(text)] == told


OLD_READS = "torch.get_float32_matmul_precision()", "torch.backends.cuda.matmul.allow_tf32"


@pytest.mark.long
def test_the_older_precision_cannot_be_read_once_the_newer_is_set(tmp_path: Path) -> None:
    (manual,) = (rule.manual for rule in RULES if rule.id == "fp32_matmul")
    code = [f"try:\n    {read}\nexcept RuntimeError:\n    print({read!r})" for read in OLD_READS]
    newer = 'torch.backends.cuda.matmul.fp32_precision = "tf32"'
    done = launch([sys.executable, "-c", "\n".join(("import torch", newer, *code))], tmp_path)
    assert done.stdout.split() == [*OLD_READS]
    assert all(f"`{name}`" in manual for name in (newer, *OLD_READS))
    assert "raise where the script, or a library, reads them" in manual
