"""The candidate store: what goes in comes out, and nothing else ever does."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from rco import formats
from rco import store as store_module
from rco.atomic_files import LockedError, WriteError
from rco.formats.integer import PackedWeight, pack
from rco.store import CandidateStore, StoreCorruptError, StoreError, StoreMismatchError

IDENTITY = {
    "model": "m" * 8,
    "data": "d" * 8,
    "settings": {"bits": (2, 4), "group_size": 8, "symmetric": False, "damp": 0.01},
}


def packed(bits, seed, *, symmetric=False, dtype=torch.bfloat16, shape=(6, 20), group=8):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, shape, generator=generator, dtype=torch.uint8)
    groups = (shape[0], -(-shape[1] // group))
    scales = torch.rand(groups, generator=generator).to(dtype)
    zeros = None if symmetric else torch.randint(2**bits, groups, generator=generator, dtype=torch.uint8)
    return PackedWeight(pack(codes, bits), scales, zeros, bits, shape, group)


def block(index):
    return {
        f"layers.{index}.{name}": {
            "2": packed(2, 10 * index + place, symmetric=place == 1),
            "4": packed(4, 10 * index + place, dtype=torch.float32),
        }
        for place, name in enumerate(["q_proj", "up_proj"])
    }


def statistics(index):
    return {
        name: {
            option: {"hessian_error": index + 0.5, "relative_error": torch.tensor(0.25)} for option in options
        }
        for name, options in block(index).items()
    }


def fill(folder, blocks=3, identity=IDENTITY):
    with CandidateStore.create_or_resume(folder, identity, blocks) as store:
        for index in store.missing_blocks:
            store.write_block(index, block(index), statistics(index))
    return store


def same(a, b):
    assert (a.bits, a.shape, a.group_size) == (b.bits, b.shape, b.group_size)
    assert torch.equal(a.packed, b.packed)
    assert torch.equal(a.scales, b.scales)
    assert a.scales.dtype == b.scales.dtype
    assert (a.zeros is None) == (b.zeros is None)
    assert a.zeros is None or torch.equal(a.zeros, b.zeros)
    assert torch.equal(a.dequantize(), b.dequantize())


def files(folder):
    """Names of all files; the holder of the lock is named as long as a store is open for writing."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock.holder")


def test_what_goes_in_comes_out(tmp_path):
    fill(tmp_path)
    store = CandidateStore.open(tmp_path, IDENTITY)
    store.verify()
    everything = store.load_all()
    for index in range(3):
        for linear, options in block(index).items():
            assert store.linears[linear] == ["2", "4"]
            for option, weight in options.items():
                same(store.load(linear, option), weight)
                same(everything[linear][option], weight)
                recorded = store.statistics(linear, option)
                assert recorded["packed_bytes"] == weight.nbytes
                assert recorded["hessian_error"] == index + 0.5
                assert recorded["relative_error"] == 0.25
    assert files(tmp_path) == [".lock", *(f"block_{i:04d}.safetensors" for i in range(3)), "manifest.json"]
    assert store.nbytes == sum((tmp_path / f"block_{i:04d}.safetensors").stat().st_size for i in range(3))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["identity"]["settings"]["bits"] == [2, 4]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads the mapped files from /proc")
def test_candidates_are_mapped_not_read(tmp_path):
    def mapped_file(address):
        with open("/proc/self/maps") as file:
            for line in file:
                start, end = (int(number, 16) for number in line.split()[0].split("-"))
                if start <= address < end:
                    name = line.split(maxsplit=5)[5].strip() if len(line.split()) > 5 else "[none]"
                    return None if name.startswith("[") else name  # such as [heap]
        raise AssertionError("no memory at this address")

    with CandidateStore.create_or_resume(tmp_path, IDENTITY, 1) as store:
        written = packed(8, 0, shape=(400, 500), group=500)
        store.write_block(0, {"linear": {"8": written}})
    loaded = CandidateStore.open(tmp_path).load("linear", "8")
    assert mapped_file(loaded.packed.data_ptr()) == str(tmp_path / "block_0000.safetensors")
    assert mapped_file(written.packed.data_ptr()) is None
    same(loaded, written)


def test_resumes_at_the_missing_blocks(tmp_path):
    store = CandidateStore.create_or_resume(tmp_path, IDENTITY, 3)
    assert store.missing_blocks == [0, 1, 2]
    store.write_block(0, block(0))
    store.write_block(2, block(2))
    store.close()
    with pytest.raises(StoreError, match="lacks 1 of 3 blocks"):
        CandidateStore.open(tmp_path)
    again = CandidateStore.create_or_resume(tmp_path, IDENTITY, 3)
    assert again.missing_blocks == [1]
    again.write_block(1, block(1))
    assert again.complete
    assert list(again.linears) == [name for index in range(3) for name in block(index)]
    CandidateStore.open(tmp_path, IDENTITY).verify()


def test_an_interrupted_write_leaves_the_store_as_it_was(tmp_path):
    """Killed inside the second block: the first is whole, the second is not there."""
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import rco.store as module
        from test_store import IDENTITY, block
        store = module.CandidateStore.create_or_resume({str(tmp_path)!r}, IDENTITY, 2)
        store.write_block(0, block(0))
        import safetensors.torch
        save = safetensors.torch.save_file
        def killed(tensors, path, metadata=None):
            save(tensors, path, metadata)
            with open(path, "rb+") as file:
                file.truncate(100)
            os.kill(os.getpid(), signal.SIGKILL)
        safetensors.torch.save_file = killed
        store.write_block(1, block(1))
    """
    assert run_python(code, check=False).returncode == -signal.SIGKILL
    store = fill(tmp_path, 2)  # the dead process's lock does not stand in the way
    assert store.complete
    assert files(tmp_path) == [".lock", "block_0000.safetensors", "block_0001.safetensors", "manifest.json"]
    reopened = CandidateStore.open(tmp_path)
    reopened.verify()
    same(reopened.load("layers.1.q_proj", "4"), block(1)["layers.1.q_proj"]["4"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, 'identity.model: was "mmmmmmmm", now "other"'),
        ({"settings": {**IDENTITY["settings"], "damp": 0.1}}, "identity.settings.damp: was 0.01, now 0.1"),
        (
            {"settings": {**IDENTITY["settings"], "order": True}},
            "identity.settings.order: was absent, now true",
        ),
    ],
)
def test_another_identity_is_never_mixed_in(tmp_path, change, message):
    fill(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    other = {**IDENTITY, **change}
    for attempt in (
        lambda: CandidateStore.create_or_resume(tmp_path, other, 3),
        lambda: CandidateStore.open(tmp_path, other),
    ):
        with pytest.raises(StoreMismatchError) as caught:
            attempt()
        assert message in str(caught.value)
        assert "`overwrite_store=True`" in str(caught.value)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before

    replaced = CandidateStore.create_or_resume(tmp_path, other, 3, overwrite=True)
    assert replaced.missing_blocks == [0, 1, 2]
    assert files(tmp_path) == [".lock", "manifest.json"]
    replaced.close()
    with pytest.raises(StoreMismatchError, match="blocks_total: was 3, now 4"):
        CandidateStore.create_or_resume(tmp_path, other, 4)


def test_overwrite_keeps_a_store_of_the_same_identity(tmp_path):
    fill(tmp_path)
    assert CandidateStore.create_or_resume(tmp_path, IDENTITY, 3, overwrite=True).complete


def test_damage_is_noticed_and_named(tmp_path):
    fill(tmp_path)
    path = tmp_path / "block_0001.safetensors"
    content = path.read_bytes()

    path.write_bytes(content[:-7])
    for attempt in (CandidateStore.open, lambda folder: CandidateStore.create_or_resume(folder, IDENTITY, 3)):
        with pytest.raises(StoreCorruptError, match=r"block_0001.safetensors is damaged.*`resume=True`"):
            attempt(tmp_path)

    flipped = bytearray(content)
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    store = CandidateStore.open(tmp_path)  # the size is right: only reading it all can tell
    with pytest.raises(StoreCorruptError, match=r"block_0001.safetensors is damaged.*SHA-256"):
        store.verify()

    path.write_bytes(b"\0" * len(content))
    with pytest.raises(StoreCorruptError, match=r"block_0001.safetensors is damaged"):
        CandidateStore.open(tmp_path).load("layers.1.q_proj", "2")

    path.unlink()
    with pytest.raises(StoreError, match="lacks 1 of 3"):
        CandidateStore.open(tmp_path)
    fill(tmp_path)
    assert path.read_bytes() == content  # only that block was made again, to the same bytes


def test_a_file_from_another_store_is_refused(tmp_path):
    fill(tmp_path / "a")
    fill(tmp_path / "b", identity={**IDENTITY, "model": "x"})
    name = "block_0000.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(StoreCorruptError, match="another store"):
        CandidateStore.open(tmp_path / "a").load("layers.0.q_proj", "2")


def test_a_full_disk_is_said_clearly_and_loses_nothing(tmp_path, monkeypatch):
    store = CandidateStore.create_or_resume(tmp_path, IDENTITY, 2)
    store.write_block(0, block(0))

    class Full:
        free = 10

    with monkeypatch.context() as patch:
        patch.setattr(store_module.shutil, "disk_usage", lambda _: Full)
        with pytest.raises(
            WriteError, match=r"block_0001.*bytes are needed, 10 are free.*enough space"
        ) as caught:
            store.write_block(1, block(1))
        assert caught.value.errno == errno.ENOSPC
    assert files(tmp_path) == [".lock", "block_0000.safetensors", "manifest.json"]
    store.write_block(1, block(1))
    assert store.complete
    store.verify()


def test_a_failing_write_of_the_file_itself(tmp_path):
    """A limit on file sizes fails in the middle of the write, as a disk does that fills up meanwhile."""
    code = f"""
        import os, resource, sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from rco.atomic_files import WriteError
        from rco.store import CandidateStore
        from test_store import IDENTITY, packed
        store = CandidateStore.create_or_resume({str(tmp_path)!r}, IDENTITY, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            store.write_block(0, {{"big": {{"8": packed(8, 0, shape=(1000, 1000), group=1000)}}}})
        except WriteError as error:
            print(error)
        print("transformers" in sys.modules, "datasets" in sys.modules)
    """
    message, loaded = run_python(code).stdout.splitlines()
    assert loaded == "False False"  # the store knows no model library
    assert "block_0000.safetensors" in message
    assert "File too large" in message
    assert files(tmp_path) == [".lock", "manifest.json"]


def test_an_unusable_folder_is_said_clearly(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"Could not write .*file: File exists.*Choose a folder"):
        CandidateStore.create_or_resume(tmp_path / "file", IDENTITY, 1)
    with pytest.raises(WriteError, match=r"Could not write .*store: Not a directory.*Choose a folder"):
        CandidateStore.create_or_resume(tmp_path / "file" / "store", IDENTITY, 1)


def test_two_writers_are_not_let_in(tmp_path):
    first = CandidateStore.create_or_resume(tmp_path, IDENTITY, 1)
    with pytest.raises(LockedError, match=f"in use by process {os.getpid()} on "):
        CandidateStore.create_or_resume(tmp_path, IDENTITY, 1)
    first.write_block(0, block(0))  # complete: from here on everybody may read
    CandidateStore.create_or_resume(tmp_path, IDENTITY, 1)
    CandidateStore.create_or_resume(tmp_path, IDENTITY, 1)


def test_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(StoreError, match="holds no candidates"):
        CandidateStore.open(tmp_path)
    store = fill(tmp_path)
    with pytest.raises(KeyError, match="no linear 'nowhere'"):
        store.load("nowhere", "2")
    with pytest.raises(KeyError, match="it has 2, 4"):
        store.load("layers.0.q_proj", "3")
    with pytest.raises(ValueError, match=r"outside 0\.\.2"):
        store.write_block(3, block(3))
    with pytest.raises(ValueError, match="must not contain"):
        store.write_block(0, {"a|b": {"2": packed(2, 0)}})
    with pytest.raises(ValueError, match="at least one block"):
        CandidateStore.create_or_resume(tmp_path, IDENTITY, 0)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(StoreError, match="version 99, this release reads version 1"):
        CandidateStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="not the manifest"):
        CandidateStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="not valid JSON"):
        CandidateStore.open(tmp_path)


def run_python(code, check=True):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def test_candidates_of_any_format_are_read_as_they_were_written(tmp_path):
    weight = torch.randn(6, 32)
    names = ["int3-g8", "original", "removed", "int4-channel-sym"]
    stored = {name: formats.parse(name).encode(weight) for name in names}
    with CandidateStore.create_or_resume(tmp_path, IDENTITY, 1) as store:
        store.write_block(0, {"linear": stored})
    with CandidateStore.open(tmp_path) as store:
        assert store.linears == {"linear": names}
        for name, written in stored.items():
            read = store.load("linear", name)
            assert type(read) is type(written)
            assert read.format == formats.parse(name)
            assert store.statistics("linear", name)["format"] == name
            assert torch.equal(read.dequantize(), written.dequantize())


@pytest.mark.parametrize("name", ["int3-g8", "int4-g16-sym", "int2-channel"])
def test_a_store_from_before_formats_had_names_is_read(tmp_path, name):
    written = formats.parse(name).encode(torch.randn(6, 32))
    with CandidateStore.create_or_resume(tmp_path, IDENTITY, 1) as store:
        store.write_block(0, {"linear": {"option": written}})
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    entry = manifest["blocks"]["0"]["linears"]["linear"]["option"]
    del entry["format"]
    entry["group_size"] = written.group_size
    path.write_text(json.dumps(manifest))
    with CandidateStore.open(tmp_path) as store:
        read = store.load("linear", "option")
        assert read.format == written.format
        assert torch.equal(read.dequantize(), written.dequantize())
