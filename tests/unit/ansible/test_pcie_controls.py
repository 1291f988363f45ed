"""Device Control of a PCIe function: found, read, set."""

import pytest

from tests import fake_fabric
from tests.ansible_modules import load

pcie = load("library/pcie_controls.py")


def test_register_is_found_behind_another_capability(tmp_path):
    config = tmp_path / "config"
    config.write_bytes(fake_fabric.pcie_config(0x2810))
    assert pcie.read_register(config) == (0x68, 0x2810)


@pytest.mark.parametrize(
    ("register", "size", "relaxed"),
    [(0x2810, 512, True), (0x5000, 4096, False), (0x0810, 128, True)],
)
def test_register_in_words(register, size, relaxed):
    said = pcie.describe(register)
    assert (said["max_read_request"], said["relaxed_ordering"]) == (size, relaxed)


@pytest.mark.parametrize("size", [128, 256, 512, 1024, 2048, 4096])
def test_read_request_changes_its_bits_alone(size):
    changed = pcie.wanted_register(0x2810, size, "keep")
    assert pcie.describe(changed)["max_read_request"] == size
    assert changed & ~0x7000 == 0x2810 & ~0x7000


def test_nothing_asked_changes_nothing():
    assert pcie.wanted_register(0x2800, 0, "keep") == 0x2800


def test_relaxed_ordering_is_added():
    assert pcie.wanted_register(0x2800, 0, "on") == 0x2810


def test_write_changes_two_bytes(tmp_path):
    config = tmp_path / "config"
    before = fake_fabric.pcie_config(0x2810)
    config.write_bytes(before)
    pcie.write_register(config, 0x68, 0x5810)
    after = config.read_bytes()
    assert [i for i in range(256) if before[i] != after[i]] == [0x69]
    assert pcie.read_register(config) == (0x68, 0x5810)


def test_a_cut_off_configuration_space_is_named():
    with pytest.raises(pcie.RegisterError, match="only 64 bytes"):
        pcie.register_offset(fake_fabric.pcie_config()[:64])


def test_a_function_without_pci_express_is_named():
    with pytest.raises(pcie.RegisterError, match="no PCI Express"):
        pcie.register_offset(bytes(256))


def test_a_looping_capability_list_ends():
    config = bytearray(256)
    config[0x06], config[0x34] = 0x10, 0x40
    config[0x40:0x42] = bytes((0x01, 0x40))
    with pytest.raises(pcie.RegisterError):
        pcie.register_offset(bytes(config))
