"""The device of a model: how it is chosen, which implementations of attention run on it, and how people read it."""

import contextlib
import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast, get_args

import torch

from refusion_eval.errors import ConfigError
from refusion_eval.models import attention
from refusion_eval.models.attention import Backend

NVIDIA_SMI_SECONDS = 20
DEVICE_FILES = Path("/dev")
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def choose_device(name: str) -> torch.device:
    """The device of a name, "auto" being CUDA where there is one; prepares torch for a CUDA device."""
    if name == "auto":
        if not torch.cuda.is_available() and (gpu := unusable_gpu()):
            raise ConfigError(
                f"this machine has a GPU ({gpu}), and torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use "
                "it: its driver may be too old for this build, or this is a build for CPUs. Set "
                "REFUSION_EVAL_TORCH_INDEX to an index with builds for this driver (`default`: the one of pip), remove "
                ".venv and run bash eval.sh --setup. "
                "To go on with the CPU all the same, give device=cpu, or hide the GPU with CUDA_VISIBLE_DEVICES=''"
            )
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device={name!r}, but torch sees {torch.cuda.device_count()} CUDA devices here; give device=cpu, the "
                "number of one that `refusion-eval doctor` lists, or PyTorch a build with CUDA"
            )
        leave_out_cudnn_attention()
    return device


@contextlib.contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """A block in which torch computes with this many threads; None leaves their number as it is.

    The number belongs to the whole process, where other models and the user's own code compute too, so it is restored.
    """
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_backend(name: str, dtype: torch.dtype, device: torch.device) -> Backend:
    """The backend of a name; "auto" is "native" on a CPU in float32 and "sdpa" elsewhere."""
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"attention={name!r} is unknown; choose auto, {', '.join(BACKENDS)}")
    if name == "auto":
        # The same for every decoder, so that all are timed on the same kernels: flash-attn serves causal forwards
        # alone, which are all of an autoregressive decoder and few of the others.
        return "sdpa" if _obstacle("native", dtype, device) else "native"
    backend = cast("Backend", name)
    if obstacle := _obstacle(backend, dtype, device):
        raise ConfigError(f"attention={name!r} is not possible: {obstacle}; use attention='sdpa'")
    return backend


def _obstacle(backend: Backend, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a backend cannot run here; None if it can."""
    if backend == "native":
        if device.type != "cpu" or dtype != torch.float32:
            return f"compiled forwards are for float32 on a CPU, not {dtype} on {device.type}"
        from refusion_eval.models.native import obstacle  # numba takes most of a second to import

        return obstacle()
    if backend == "sdpa":
        return None
    if attention.flash_attn_func is None:
        return "flash-attn is not installed (in a checkout: pip install '.[flash]')"
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {device.type}"
    return None if dtype in (torch.bfloat16, torch.float16) else f"flash-attn needs bfloat16 or float16, not {dtype}"


def leave_out_cudnn_attention() -> None:
    """Leaves cuDNN out of the backends of torch's attention: flash, memory-efficient and plain attention remain."""
    # On compute capability 9 and above torch may prefer cuDNN for bfloat16. It builds a plan for every new pair of
    # query and key lengths, which takes tens of milliseconds and is never freed; here nearly every forward is one.
    torch.backends.cuda.enable_cudnn_sdp(False)


def unusable_gpu() -> str | None:
    """Name of an NVIDIA GPU that this process may use by its environment; asked where torch finds none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "none", "NoDevFiles"):
        return None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "-L"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return next((line.partition(" (")[0] for line in answer.stdout.splitlines() if line.startswith("GPU ")), None)
    return next((str(path) for path in sorted(DEVICE_FILES.glob("nvidia[0-9]*"))), None)


def device_label(device: torch.device) -> str:
    """The device as people read it, with the name of a GPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def energy_counter(device: torch.device) -> Callable[[], float] | None:
    """Returns a function that reads the GPU's energy counter (J), or None."""
    # The counter is the device's own (NVML, by UUID; GPUs since Volta have one) and needs the package nvidia-ml-py. It
    # counts the whole GPU, whoever uses it, and advances in steps of some tens of milliseconds: the energy of a short
    # response is rough, the mean of many is not.
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError:  # an older GPU, a part of one (MIG), or no rights
        return None
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000  # of millijoules
