"""Keeps secrets out of what is recorded: of command lines and source lines little is kept, by form.

Of a command line: programs, scripts, the names of options, and values that are numbers or settings listed here. All
else becomes DROPPED, whatever it is. Where arguments are kept on request (`--keep-arguments`), and in texts, what is
named like a secret, and URLs with more than host and path, become REDACTED. Of the environment, only the
variables listed here are recorded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"
DROPPED = "…"

# Words that mark a name as a secret's: as its last word (HF_TOKEN, api_key), and anywhere in it (--db-password).
_LAST_WORDS = """
apikey auth authorization cookie cookies cred creds credential credentials jwt key keys pass pat pin psk pw pwd sig
signature token
"""
_LAST = frozenset(_LAST_WORDS.split())
_ANYWHERE = frozenset(("passphrase", "passwd", "password", "passwords", "secret", "secrets"))

# Names in which such a word has another meaning in training code.
_HARMLESS = re.compile(
    r"(?:^|[-_.])(?:bos|by|cls|eos|group|head|mask|max|min|num|pad|per|public|sep|sort|special|unk)[-_.]?(?:token|keys?)$",
    re.I,
)
_WORDS = re.compile(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]+")

# A URL with a user or a query; a user and password without a scheme.
_URL = re.compile(r"://(?=[^@?#]*[@?#])")
_USER = re.compile(r"(?<![^\s\"'=,(\[])[^\s@/:]{0,100}:[^\s@]\S*@")
# A name that is given a value: assigned, in JSON or a dict, as a header, or an option and the word after it.
_NAMED = re.compile(r"(?<![\w-])(--?)?([A-Za-z][\w.-]{0,80})(?:[\"'\\\]]*\s*[=:,]|(?(1)\s|(?!)))[\s\"'\\]*(?=\S)")
_SCHEME = re.compile(r"\b(?:Basic|Bearer)\s+(?=\S)")

# What makes up the settings that are kept, in words of letters, digits aside: adamw, cuda:0, bf16-mixed, resnet50,
# cosine_with_warmup, max-autotune-no-cudagraphs, torch.float16.
_SETTING_WORDS = """
true false yes no on off none null auto default all always never dynamic static standalone
bf fp tf int uint float bfloat half double amp mixed precision ieee highest high medium torch
sgd adam adamw adagrad adadelta adamax nadam radam rmsprop lamb lars lion adafactor muon fused foreach loop nesterov
constant linear cosine polynomial exponential multistep step plateau onecycle cyclic warmup restarts annealing with
cpu cuda gpu mps xpu hip tpu nccl gloo mpi ucc fork spawn forkserver
ddp fsdp deepspeed zero full shard sharded hybrid offload powersgd gpipe interleaved
eager inductor aot compile reduce overhead max autotune cudagraphs sdpa flash efficient math attention
relu gelu silu swish tanh sigmoid softmax layer layernorm rms rmsnorm batch batchnorm group groupnorm norm
train val valid validation test eval mean sum min channels last contiguous format
resnet vit bert gpt llama unet convnext efficientnet mobilenet imagenet cifar mnist wikitext
tiny mini nano small base large huge
"""
_SETTINGS = frozenset(_SETTING_WORDS.split())
_PARTS = re.compile(r"[-_.:,+]")
_PART = re.compile(r"([a-z]*)([0-9]{0,4})")
_NUMBER = r"[-+]?(?:[0-9]{1,10}\.?[0-9]{0,10}|\.[0-9]{1,10})(?:e[-+]?[0-9]{1,3})?"
_NUMBERS = re.compile(rf"[\[(]?{_NUMBER}(?:[,:x]\s?{_NUMBER}){{0,15}}[\])]?(?:[kmgt]i?b?|%|ms|[smh])?", re.I)
_PLACEHOLDER = re.compile(r"\{[A-Za-z_]\w*\}")  # of a sweep
# The name of an option, words of letters with few digits at their ends: --adam-beta1, -np, +trainer.max_epochs.
_WORD = "(?:[A-Za-z]+[0-9]{0,3}|[0-9]{1,3})"
_OPTION = re.compile(rf"-[A-Za-z]{{1,2}}|--{_WORD}(?:[-_.]{_WORD}){{0,7}}")
_SHORT = re.compile(r"-[A-Za-z][0-9]{1,4}")
_ASSIGNED = re.compile(r"[+~]{0,2}([a-z]+(?:[._][a-z]+)*|[A-Z]+(?:_[A-Z]+)*)")
_LONGEST = 60
# Programs, scripts and modules, as far as a command names them plainly.
_PATH = re.compile(r"[\w.+,~/-]{1,400}")
_SCRIPTS = (".py", ".sh", ".ipynb")
_PYTHON = re.compile(r"(?:python|pypy)[0-9.]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_LAUNCHERS = frozenset(("torchrun", "torch", "accelerate", "deepspeed", "launch"))
_PROGRAM_NAMES = "env bash sh nsys profile numactl taskset time mpirun mpiexec srun uv run nice"
_PROGRAMS = _LAUNCHERS | frozenset(_PROGRAM_NAMES.split())

# A string literal, a comment or a long number in source; a string that does not end goes on to the end of its line, or
# of the text. A field of an f-string may hold its quotes.
_FIELD = r"(?:\{\{|\{(?:[^{}\n]|\{[^{}\n]*\})*\})"
_LITERAL = re.compile(
    rf"""
    \#[^\n]*
    | (?P<long>\"\"\"|\'\'\')(?P<lines>(?:[^\\\"\']|\\.|(?!(?P=long)).)*)(?P<closed>(?P=long))?
    | (?P<f>(?<=[fFtT])|(?<=[fFtT][rR]))?
      (?P<quote>[\"\'])(?P<body>(?:\\.|(?(f){_FIELD}|(?!))|(?!(?P=quote))[^\\\n])*)(?P<end>(?P=quote))?
    | (?<![\w.])[0-9][\w.]{{9,}}
    """,
    re.X | re.S,
)
_BEFORE_KEY = re.compile(r"[\w)\]]\[$|\btensor $")
_GIVEN_NUMBER = re.compile(r"(?<!\w)([A-Za-z_]\w*)([\"']?\]?\s*[=:]\s*)[0-9][\w.]*")
_KEY = re.compile(r"[a-z_]{1,30}")

# The environment variables that are recorded: those that affect training.
_VARIABLES = """
CUBLASLT_WORKSPACE_SIZE
CUBLAS_WORKSPACE_CONFIG
CUDA_CACHE_DISABLE CUDA_CACHE_MAXSIZE CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES
GLOO_SOCKET_IFNAME
GOMP_CPU_AFFINITY
HIP_LAUNCH_BLOCKING HIP_VISIBLE_DEVICES
HSA_ENABLE_SDMA HSA_FORCE_FINE_GRAIN_PCIE HSA_OVERRIDE_GFX_VERSION
KINETO_LOG_LEVEL KINETO_USE_DAEMON
KMP_AFFINITY KMP_BLOCKTIME
MIOPEN_DISABLE_CACHE MIOPEN_FIND_ENFORCE MIOPEN_FIND_MODE
MKL_DYNAMIC MKL_NUM_THREADS MKL_THREADING_LAYER
NCCL_ALGO NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_BUFFSIZE NCCL_CGA_CLUSTER_SIZE NCCL_COLLNET_ENABLE
NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE NCCL_GRAPH_REGISTER
NCCL_IB_AR_THRESHOLD NCCL_IB_CUDA_SUPPORT NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_QPS_PER_CONNECTION
NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_LAUNCH_MODE NCCL_MAX_CTAS
NCCL_MAX_NCHANNELS NCCL_MAX_NRINGS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MIN_NRINGS NCCL_NCHANNELS_PER_NET_PEER
NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_PLUGIN NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVLS_ENABLE
NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_P2P_NET_CHUNKSIZE NCCL_PROTO NCCL_PXN_DISABLE NCCL_SHM_DISABLE
NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_TOPO_FILE NCCL_TUNER_PLUGIN NCCL_WORK_FIFO_DEPTH
NVIDIA_TF32_OVERRIDE
OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE OMP_WAIT_POLICY
NUMEXPR_MAX_THREADS NUMEXPR_NUM_THREADS
OPENBLAS_NUM_THREADS
PYTHONDEVMODE PYTHONMALLOC PYTHONTRACEMALLOC
PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_HIP_ALLOC_CONF PYTORCH_JIT
PYTORCH_MIOPEN_SUGGEST_NHWC PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NVML_BASED_CUDA_CHECK PYTORCH_TUNABLEOP_ENABLED
PYTORCH_TUNABLEOP_TUNING
RCCL_MSCCLPP_ENABLE RCCL_MSCCL_ENABLE
ROCR_VISIBLE_DEVICES
SLURMD_NODENAME SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_JOB_ID SLURM_NNODES SLURM_NTASKS
TEARDOWN_CUPTI
TOKENIZERS_PARALLELISM
TORCHDYNAMO_DISABLE
TORCHINDUCTOR_COORDINATE_DESCENT_TUNING TORCHINDUCTOR_FREEZING TORCHINDUCTOR_FX_GRAPH_CACHE
TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_MAX_AUTOTUNE_GEMM
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT TORCH_BLAS_PREFER_HIPBLASLT TORCH_COMPILE_DISABLE
TORCH_CPP_LOG_LEVEL TORCH_CUDNN_V8_API_DISABLED TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT TORCH_DISTRIBUTED_DEBUG
TORCH_FR_BUFFER_SIZE TORCH_LOGS TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS
TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_ENABLE_MONITORING
TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_TRACE_BUFFER_SIZE
TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_SHOW_CPP_STACKTRACES TORCH_USE_CUDA_DSA
"""
VARIABLES = frozenset(_VARIABLES.split())


def is_secret(name: str) -> bool:
    """Return whether an option or a variable is named like a secret."""
    bare = name.lstrip("-")
    found = [word.lower() for word in _WORDS.findall(bare)]
    return bool(found) and (not _ANYWHERE.isdisjoint(found) or (found[-1] in _LAST and _HARMLESS.search(bare) is None))


def text(said: str) -> str:
    """Return a text, such as a word of a command, with secrets redacted: from the first one with a name on, all of it.

    So it is from a URL's host on, where the URL has more than host and path. Where such a value ends cannot be known:
    it may hold quotes, commas, blanks and an @.
    """
    named = (found for found in _NAMED.finditer(said) if is_secret(found[2]))
    begins = [found.end() for found in (_URL.search(said), _SCHEME.search(said), next(named, None)) if found]
    if begins:
        said = said[: min(begins)] + REDACTED
    return _USER.sub(f"{REDACTED}@", said)


def setting(value: str) -> str:
    """Return a value where it is a number or a setting that is known, else DROPPED."""
    return value if _is_setting(value) else DROPPED


def _is_setting(value: str) -> bool:
    if len(value) > _LONGEST or not value.isascii():
        return False
    if _NUMBERS.fullmatch(value) or _PLACEHOLDER.fullmatch(value):
        return True
    parts = [_PART.fullmatch(part) for part in _PARTS.split(value.lower())]
    return (
        len(parts) <= 6
        and all(p is not None and (not p[1] or p[1] in _SETTINGS) and p[0] for p in parts)
        and bool(parts[0] and parts[0][1])
    )


def words(command: Sequence[str], *, keep: bool = False) -> list[str]:
    """Return what is kept of the words of a command, or of sys.argv; `keep`: all that is not redacted."""
    found: list[str] = []
    secret = False  # the word before names a secret: whatever follows is its value, also with a dash
    for n, word in enumerate(map(str, command)):
        name, equals, _ = word.partition("=")
        kept = REDACTED if secret else text(word) if keep else _kept(word, command[:n], found)
        secret = not secret and not equals and name.startswith("-") and is_secret(name)
        if kept != DROPPED or found[-1:] != [DROPPED]:
            found.append(kept)
    return found


def _kept(word: str, before: Sequence[str], found: Sequence[str]) -> str:
    """Return what is kept of a word, after those words, of which some are `found`."""
    last = found[-1] if found else ""
    program = not before or (last == before[-1] and _is_python(last))
    if before and before[-1] == "-c":
        return DROPPED
    if word in ("-", "--", "-c") or is_option(word):
        return word
    is_file = os.path.isfile  # Path's raises OSError for what is too long
    plainly = _PATH.fullmatch(word) or is_file(word) or word.endswith(".ipynb")  # Jupyter may know it by another path
    if program and plainly and not word.startswith("-"):
        return word
    if _PATH.fullmatch(word) and (word.endswith(_SCRIPTS) or _is_python(word) or _begins(found, word)):
        return word
    if (last == "-m" and _MODULE.fullmatch(word)) or (word.startswith("-m") and _MODULE.fullmatch(word[2:])):
        return word if _before_module(found) else DROPPED
    name, equals, value = word.partition("=")
    if equals and is_option(name):
        return f"{name}={REDACTED if is_secret(name) else setting(value)}"
    if equals:
        given = _ASSIGNED.fullmatch(name)
        return word if given and not is_secret(given[1]) and _is_setting(value) else DROPPED
    follows = bool(before) and last == before[-1] and (is_option(last) or bool(_NUMBERS.fullmatch(last)))
    return word if _SHORT.fullmatch(word) or (follows and _is_setting(word)) else DROPPED


def is_option(word: str) -> bool:
    """Return whether a word is written as the name of an option."""
    return len(word) <= _LONGEST and _OPTION.fullmatch(word) is not None


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(word.rpartition("/")[2]) is not None


def _begins(found: Sequence[str], word: str) -> bool:
    """Return whether a word is a program that starts another: no script has been named yet."""
    return word.rpartition("/")[2] in _PROGRAMS and not any(w.endswith(_SCRIPTS) for w in found)


def _before_module(found: Sequence[str]) -> bool:
    """Return whether -m after these words is Python's or a launcher's: neither a script nor a module has been named."""
    modules = [after for word, after in pairwise(found) if word == "-m"]
    return (
        any(_is_python(word) or word.rpartition("/")[2] in _LAUNCHERS for word in found)
        and not any(word.endswith(_SCRIPTS) for word in found)
        and all(module.partition(".")[0] in _LAUNCHERS for module in modules)
    )


def source(code: str) -> str:
    """Return lines of source without their comments, and with DROPPED in string literals, line by line as they were.

    Literals of one or two characters, of settings that are known, names of options, and plain words that are keys stay.
    So does the rest: names and numbers, but for those that are named like a secret or are long.
    """

    def kept(found: re.Match[str]) -> str:
        quote, body, end = found["long"], found["lines"], found["closed"]
        if quote is None:
            quote, body, end = found["quote"], found["body"], found["end"]
        if quote is None:
            return DROPPED if found[0][0].isdigit() else ""
        is_key = _KEY.fullmatch(body) and _BEFORE_KEY.search(code, max(found.start() - 8, 0), found.start())
        if end and (len(body) <= 2 or is_key or _is_setting(body) or (is_option(body) and not is_secret(body))):
            return found[0]
        return "".join((quote, DROPPED, "\n" * body.count("\n"), end or ""))

    def number(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{DROPPED}" if is_secret(found[1]) else found[0]

    code = _GIVEN_NUMBER.sub(number, code)
    return _LITERAL.sub(kept, code)


def said(output: str, command: Sequence[str]) -> str:
    """Return what a command printed without the values of its arguments that are not kept, and redacted."""
    values = set()
    for before, word in zip(("", *command), command, strict=False):
        kept = words(("", before, word))[-1]
        values |= {word, word.partition("=")[2]} if DROPPED in kept or REDACTED in kept else set()
    for value in sorted(values, key=len, reverse=True):
        output = output.replace(value, DROPPED) if len(value) > 2 else output
    return text(output)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are recorded."""
    return {name: text(env[name]) for name in sorted(VARIABLES & env.keys())}


def shown(name: str, value: Any) -> Any:
    """Return the value of an override as it is recorded: short; of variables not in VARIABLES only settings."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    group, _, variable = name.partition(".")
    if group != "env":
        return str(value)[:200]
    if is_secret(variable):
        return REDACTED
    return text(str(value))[:200] if variable in VARIABLES else setting(str(value))
