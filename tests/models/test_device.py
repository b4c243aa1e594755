"""The choice of a device (`refusion_eval.models.device`), on machines with and without a GPU that torch can use."""

import sys
from types import SimpleNamespace

import pytest
import torch

from refusion_eval.errors import ConfigError
from refusion_eval.models import device as devices
from refusion_eval.models.device import (
    CUDA_RESERVE,
    cache_bytes_per_row,
    choose_device,
    default_budget,
    energy_counter,
    rows_within,
)
from refusion_eval.runs.hardware import collect_hardware
from tests.engine.random_model import random_transformer


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without a GPU; the test may give it one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def give_nvidia_smi(folder, *lines):
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)


def test_without_a_gpu_auto_is_the_cpu(machine):
    assert choose_device("auto") == torch.device("cpu")


def test_a_gpu_that_torch_cannot_use_is_an_error_with_advice(machine):
    give_nvidia_smi(machine, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    with pytest.raises(ConfigError, match=r"GPU 0: NVIDIA H100 80GB HBM3\).*REFUSION_EVAL_TORCH_INDEX.*device=cpu"):
        choose_device("auto")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_device_file_shows_a_gpu_where_nvidia_smi_is_not_installed(machine):
    (machine / "nvidiactl").touch()
    assert choose_device("auto") == torch.device("cpu")
    (machine / "nvidia0").touch()
    with pytest.raises(ConfigError, match="nvidia0"):
        choose_device("auto")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_on_purpose_is_none(machine, monkeypatch, hidden):
    give_nvidia_smi(machine, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device("auto") == torch.device("cpu")


def test_nvidia_smi_that_finds_no_gpu_shows_none(machine):
    give_nvidia_smi(machine, "No devices found.")
    (machine / "nvidia0").touch()
    assert choose_device("auto") == torch.device("cpu")


def test_a_cuda_device_leaves_cudnn_out_of_attention(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_device("cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert choose_device("auto") == torch.device("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    with pytest.raises(ConfigError, match="torch sees 2 CUDA devices here; give device=cpu"):
        choose_device("cuda:2")


CONFIG = random_transformer().config
ROW = cache_bytes_per_row(CONFIG, torch.float32)


@pytest.mark.parametrize(
    ("free", "cached", "expected"),
    [
        (10 * 2**30, 0, 10 * 2**30 - CUDA_RESERVE),
        (2**30, 9 * 2**30, 10 * 2**30 - CUDA_RESERVE),  # what torch keeps of an earlier batch can be used again
        (2**30, 0, (CONFIG.max_positions + 1) * ROW * 10 // 8),  # one long text may take of the reserve
        (1000, 0, 1000),
    ],
)
def test_the_budget_is_what_torch_can_use(monkeypatch, free, cached, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: cached + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    budget = default_budget(torch.device("cuda"), CONFIG, torch.float32)
    assert budget == pytest.approx(expected, abs=2)
    if free > 1000:
        assert rows_within(budget, CONFIG, torch.float32) >= CONFIG.max_positions


def test_a_gpu_is_recorded_by_its_identity(machine, monkeypatch):
    properties = SimpleNamespace(uuid="0f5c", name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = torch.device("cuda", 1)
    without_nvidia_smi = collect_hardware(1, gpu)
    assert without_nvidia_smi.gpu_detail == {"cuda": "None", "cudnn": str(torch.backends.cudnn.version())}
    assert (without_nvidia_smi.gpu, without_nvidia_smi.gpu_driver, without_nvidia_smi.num_gpus) == ("H100", "", 1)
    give_nvidia_smi(machine)
    (machine / "nvidia-smi").write_text(
        '#!/bin/sh\n[ "$3" = --id=GPU-0f5c ] && echo "NVIDIA H100, 580.65, 80 GiB, 1, 2, 3, 4, 700 W"\n'
    )
    found = collect_hardware(1, gpu)
    assert (found.gpu, found.gpu_driver, found.gpu_detail["power.limit"]) == ("NVIDIA H100", "580.65", "700 W")
    assert "choices" not in found.gpu_detail
    assert collect_hardware(1, gpu, choices="NVIDIA H100 0f5c").gpu_detail["choices"] == "NVIDIA H100 0f5c"


class Nvml:
    """NVIDIA's library with one GPU, whose counter advances by 1500 mJ a call."""

    NVMLError = RuntimeError

    def __init__(self, uuid: str = "GPU-0f5c", has_counter: bool = True) -> None:
        self.uuid, self.has_counter, self.millijoules = uuid, has_counter, 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != self.uuid:
            raise RuntimeError("Not Found")
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.has_counter or handle != "handle":
            raise RuntimeError("Not Supported")
        self.millijoules += 1500
        return self.millijoules


@pytest.fixture
def gpu_of_uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0f5c"))
    return torch.device("cuda", 1)


def test_energy_is_read_in_joules_from_the_counter_of_the_gpu(gpu_of_uuid, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    read = energy_counter(gpu_of_uuid)
    before = read()
    assert read() - before == 1.5


@pytest.mark.parametrize("nvml", [None, Nvml(uuid="GPU-other"), Nvml(has_counter=False)])
def test_without_a_counter_there_is_no_energy(gpu_of_uuid, monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # of None an import fails
    assert energy_counter(gpu_of_uuid) is None


def test_a_cpu_has_no_counter(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert energy_counter(torch.device("cpu")) is None
