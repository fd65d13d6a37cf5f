"""Which device is a rank's own."""

from __future__ import annotations

import pytest

from jupyter_ddp.runtime.device import own_device


@pytest.mark.parametrize(
    ("present", "chosen", "devices"),
    [
        (0, None, "cpu cpu cpu"),
        (0, "0,1", "cpu cpu cpu"),
        (2, None, "cuda:0 cuda:1 cpu"),
        (2, "", "cpu cpu cpu"),
        (2, "-1", "cpu cpu cpu"),
        (2, "NoDevFiles", "cpu cpu cpu"),
        (2, "1", "cuda:0 cpu cpu"),
        (2, "1, 0", "cuda:0 cuda:1 cpu"),
        (2, "1,7,0", "cuda:0 cpu cpu"),
        (1, "MIG-aa,MIG-bb", "cuda:0 cuda:1 cpu"),
        (4, "GPU-aa", "cuda:0 cpu cpu"),
    ],
)
def test_a_rank_has_the_gpu_of_its_local_number_if_cuda_shows_so_many(tmp_path, present, chosen, devices):
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", *(f"nvidia{number}" for number in range(present))):
        (tmp_path / name).touch()
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    found = [own_device(local_rank, environ, str(tmp_path)) for local_rank in range(3)]
    assert found == devices.split()


def test_a_machine_without_device_nodes(tmp_path):
    assert own_device(0, {}, str(tmp_path / "none")) == "cpu"
