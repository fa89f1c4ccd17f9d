"""Keeps secrets out of what is recorded.

Values of options and variables that are named like secrets, and user names and passwords in URLs, become REDACTED. Of
the environment, only the variables listed here are recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

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

_URL_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@\"']+@")
# Within a text: an option and its value, or a name that is given one.
_VALUE = r"(\"[^\"]*\"|'[^']*'|[^\s\"';&|-][^\s\"';&|]*)"
_OPTION = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w.-]*)(=|\s+){_VALUE}")
_ASSIGNED = re.compile(rf"(?<![\w-])([A-Za-z][\w.-]*)(=|:\s*)((?:Basic|Bearer)\s+)?{_VALUE}")

# The environment variables that are recorded: those that affect training.
_VARIABLES = """
CUBLASLT_WORKSPACE_SIZE
CUBLAS_WORKSPACE_CONFIG
CUDA_CACHE_DISABLE CUDA_CACHE_MAXSIZE CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES
GLOO_SOCKET_IFNAME
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
OPENBLAS_NUM_THREADS
PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_HIP_ALLOC_CONF PYTORCH_JIT
PYTORCH_MIOPEN_SUGGEST_NHWC PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NVML_BASED_CUDA_CHECK PYTORCH_TUNABLEOP_ENABLED
PYTORCH_TUNABLEOP_TUNING
RCCL_MSCCLPP_ENABLE RCCL_MSCCL_ENABLE
ROCR_VISIBLE_DEVICES
SLURMD_NODENAME SLURM_CPUS_ON_NODE SLURM_JOB_ID SLURM_NNODES SLURM_NTASKS
TEARDOWN_CUPTI
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
    """Return a text, such as a command line, with secrets redacted."""

    def value(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}{REDACTED}" if is_secret(found[1]) else found[0]

    return _ASSIGNED.sub(value, _OPTION.sub(value, _URL_USER.sub(rf"\1{REDACTED}@", said)))


def words(command: Sequence[str]) -> list[str]:
    """Return the words of a command, or of sys.argv, with secrets redacted."""
    found: list[str] = []
    for word in command:
        before = found[-1] if found else ""
        follows = before.startswith("-") and "=" not in before and is_secret(before) and not word.startswith("-")
        name, equals, _ = word.partition("=")
        if follows:
            found.append(REDACTED)
        elif equals and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name) and is_secret(name):
            found.append(f"{name}={REDACTED}")
        else:
            found.append(text(word))
    return found


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are recorded."""
    return {name: text(env[name]) for name in sorted(VARIABLES & env.keys())}


def shown(name: str, value: Any) -> Any:
    """Return the value of an override as it is recorded: plain, short, and redacted where `name` is a secret's."""
    if name.startswith("env.") and value is not None and is_secret(name.partition(".")[2]):
        return REDACTED
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)[:200]
