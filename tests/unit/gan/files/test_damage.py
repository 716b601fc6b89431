"""Damage in the files of a checkpoint, and what is crafted: see [Note: damage] in gan/files/checkpoint.py."""

import errno
import json
import os
import pickle
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from gan.files.checkpoint import Share, check, load, read, whole
from gan.files.errors import Damaged, UserError
from gan.files.tensors import CHECKSUMS
from strategies.checkpoint.folders import remove
from strategies.checkpoint.writing import save
from tests.support.posix import not_on_windows
from tests.support.saved import Malice, number_of, numbered, seal, seal_text, values_of

DAMAGE = "a flipped bit, exchanged tensors, another dtype, a file that is cut, missing, or of another checkpoint"


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "x.ckpt", numbered(1, 20))
    return tmp_path / "x.ckpt"


@pytest.mark.promise(DAMAGE)
def test_a_file_that_is_gone_or_torn_is_named(path):
    for file in path.iterdir():
        content, name = file.read_bytes(), re.escape(file.name)
        for torn in (content[:-1], b"", content + b" "):
            file.write_bytes(torn)
            with pytest.raises(Damaged, match=rf"x.ckpt cannot be read as a checkpoint: {name} is damaged"):
                number_of(path)
        file.unlink()
        with pytest.raises(Damaged, match=f"{name} is missing"):
            number_of(path)
        file.write_bytes(content)
    assert number_of(path) == 1
    for file in path.iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"it has no values.json; is it a run's folder\?"):
        number_of(path)


@pytest.mark.promise(DAMAGE, "an error names the checkpoint, the file and the tensor")
def test_a_flipped_bit_is_noticed_wherever_it_is(path):
    """So is another header or other elements, by the same checksums; and `check` finds the same."""
    for file in path.iterdir():
        content = bytearray(file.read_bytes())
        for place in range(0, len(content), 3):
            content[place] ^= 1 << place % 8
            file.write_bytes(content)
            with pytest.raises(Damaged, match=rf"{re.escape(file.name)} is damaged"):
                number_of(path) if place % 2 else check(path)
            content[place] ^= 1 << place % 8
        file.write_bytes(content)
    check(path)
    assert number_of(path) == 1


def shard_of(path):
    """The file with tensors, its header and its elements."""
    (file,) = path.glob("shard-*")
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return file, json.loads(content[8 : 8 + size]), content[8 + size :]


def put_shard(file, header, elements):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + elements)


@pytest.mark.promise(DAMAGE)
def test_a_file_of_another_checkpoint_is_noticed(path, tmp_path):
    save(tmp_path / "y.ckpt", numbered(2))
    for file in path.iterdir():
        own = file.read_bytes()
        file.write_bytes((tmp_path / "y.ckpt" / file.name).read_bytes())
        with pytest.raises(Damaged):
            number_of(path)
        file.write_bytes(own)
    (path / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(Damaged, match=r"shard-00009-.* is no file of it; remove that file"):
        load(path)


def test_what_a_rank_does_not_read_is_not_checked_by_it_but_by_check(tmp_path):
    path, tensor = tmp_path / "x.ckpt", torch.arange(1_000_000.0)  # four chunks
    save(path, {"t": Share.whole(tensor)})
    file, header, elements = shard_of(path)
    put_shard(file, header, elements[:-1] + b"!")
    part = torch.zeros(1000)
    read({load(path)["t"]: Share(part, tensor.shape, 500_000)})
    assert torch.equal(part, tensor[500_000:501_000])
    with pytest.raises(Damaged, match="'t' in it is not what was written"):
        read({load(path)["t"]: Share(part, tensor.shape, 999_000)})
    with pytest.raises(Damaged, match="'t' in it is not what was written"):
        check(path)


def test_a_disk_that_fails_is_damage_and_a_folder_that_may_not_be_read_is_not(path):
    for number, kind in ((errno.EIO, Damaged), (errno.EACCES, UserError)):
        with mock.patch("gan.files.tensors.fill", side_effect=OSError(number, "a reason")):
            with pytest.raises(UserError, match="a reason") as raised:
                number_of(path)
            assert type(raised.value) is kind


@pytest.mark.promise("a checkpoint is replaced while it is read", "it is noticed")
def test_one_that_is_replaced_or_removed_while_it_is_read_is_noticed(path):
    tree = load(path)
    save(path, numbered(2))
    with pytest.raises(UserError, match="it was replaced by a newer one meanwhile; try again"):
        whole(tree)
    assert number_of(path) == 2
    tree = load(path)
    remove(path)
    with pytest.raises(UserError, match=r"it was removed meanwhile$"):
        whole(tree)


def test_an_earlier_format_is_named_and_may_be_replaced_and_removed(path):
    (path / "values.json").rename(path / "values.pt")
    (path / "digests.json").write_text("{}")
    with pytest.raises(UserError, match=r"x.ckpt cannot .*: it was written by an earlier version .* \(format 2") as old:
        load(path)
    assert not isinstance(old.value, Damaged)
    replaced_and_removed(path, "values.pt")


def replaced_and_removed(path, more):
    """A checkpoint with a file more in it."""
    save(path, numbered(2))
    assert number_of(path) == 2 and not (path / more).exists()
    (path / more).write_text("the good one")
    remove(path)
    assert not path.exists()


def test_a_checkpoint_with_a_note_in_it_is_still_one(path):
    (path / "note.txt").write_text("the good one")
    assert number_of(path) == 1
    replaced_and_removed(path, "note.txt")


# ---- crafted on purpose, with checksums that fit ----


def change_header(of="state/a", **changes):
    """A change of what the header says of `state/a`, which has 20 numbers of 4 bytes, or of its metadata."""

    def change(path):
        file, header, elements = shard_of(path)
        header[of].update(changes)
        put_shard(file, header, elements)

    return change


def write_header(text):
    def change(path):
        file, _, elements = shard_of(path)
        file.write_bytes(len(text).to_bytes(8, "little") + text + elements)

    return change


def twice(path):
    """The same ranges in two files."""
    file, header, elements = shard_of(path)
    put_shard(file.with_name("shard-00002-model-00001-of-00001.safetensors"), header, elements)


def half_twice(path):
    """Two pieces that are together as many numbers as the tensor has, but the same ones."""
    file, header, elements = shard_of(path)
    for name in ("state/a", "state/b"):
        header[name] |= {"shape": [10], "data_offsets": [0, 40] if name == "state/a" else [40, 80]}
    header["__metadata__"][CHECKSUMS] = json.dumps({name: 8 * "0" for name in ("state/a", "state/b")})
    put_shard(file, header, elements[:80])
    twice(path)


def change_values(**changes):
    """A change of what values.json has."""

    def change(path):
        seal(path, {**values_of(path), **changes})

    return change


def claim(*content, kind="$share"):
    """Something else where `state/a` is."""
    return change_values(values={"state": {"a": {kind: list(content)}}})


def without_checksum(path):
    seal(path)
    content = values_of(path)
    seal_text(path, json.dumps({**content, "files": dict.fromkeys(content["files"])}).encode())


def write_values(text):
    return lambda path: seal_text(path, text)


DEEP, METADATA = b"[" * 100_000, "__metadata__"
SHARD, PLACE = "shard-00001.* is damaged: ", "'state/[ab]' in it has no place of its own"
NO_HEADER, NOT_WHOLE = SHARD + "its header is not that of a safetensors file", "'state/a' is missing or not whole"
HOLDS, NONE = (f"values.json is damaged: it holds {what}" for what in ("what checkpoints do not hold", "no values"))


@pytest.mark.promise(
    "a checkpoint that was crafted: huge shapes, overlaps, deep nesting",
    "one line; no memory is taken for what is not there",
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_header(shape=[10**15]), SHARD + PLACE),
        (change_header(dtype="I32"), SHARD + "'state/a' in it does not hold numbers of torch.float32"),
        (change_header(shape=[-4, -5]), SHARD + PLACE),
        (change_header(data_offsets=[80, 160]), SHARD + PLACE),
        (change_header(shape=[10**15], data_offsets=[0, 4 * 10**15]), SHARD + "'state/a' in it has no checksums"),
        (change_header(METADATA, DCP_SHARDING_INFO='{"state/a": {}}'), NO_HEADER),
        (change_header(METADATA, DCP_SHARDING_INFO='{"state/a": {"saved_offsets": [-5]}}'), SHARD + PLACE),
        (change_header(METADATA, DCP_SHARDING_INFO='{"state/a": {"saved_offsets": [5]}}'), NOT_WHOLE),
        (change_header(METADATA, CRC32_OF_EACH_MIB='{"state/a": "", "state/b": ""}'), SHARD + ".* has no checksums"),
        (write_header(DEEP), NO_HEADER),
        (write_header(b"\xff\xfe"), NO_HEADER),
        (lambda path: shard_of(path)[0].write_bytes(b"\xff" * 100), SHARD + "it has no header"),
        (twice, NOT_WHOLE),
        (half_twice, NOT_WHOLE),
        (claim("state/a", "F32", [10**15]), NOT_WHOLE),
        (claim("state/a", "F32", [10**15], kind="$tensor"), NOT_WHOLE),
        (claim("state/a", "F32", [0, 2**62, 2**62]), f"{HOLDS}|{NOT_WHOLE}"),
        (claim("state/a", "F64", [20]), SHARD + "'state/a' in it does not hold numbers of torch.float64"),
        (claim("state/a", "F32", [20], kind="$object"), HOLDS),
        (change_values(values={"a": {"$dtype": "load"}}), HOLDS),
        (change_values(values={"$tuple": []}), HOLDS),
        (change_values(values={"a": {"$view_as_complex": {"$tensor": ["state/a", "F32", [20]]}}}), HOLDS),
        (change_values(values={name: {"$share": ["state/a", "F32", [20]]} for name in "ab"}), NOT_WHOLE),
        (without_checksum, SHARD + "its header is not what was written"),
        (change_values(format="two"), NONE),
        (write_values(b"[]"), NONE),
        (write_values(b'{"format": 3, "files": {}, "values": ' + DEEP + b"}"), NONE),
        *((write_values(b"{" + text), NONE) for text in (b"\xff", pickle.dumps({"a": 1}), b"")),
    ],
)
def test_what_was_crafted_is_refused_in_one_line(change, message, path):
    change(path)
    if not change.__qualname__.startswith(("change_values", "write_values", "without")):
        seal(path)
    with pytest.raises(Damaged, match=f"x.ckpt cannot be read as a checkpoint: ({message})") as raised:
        whole(load(path))
    assert "\n" not in str(raised.value) and "weights_only" not in str(raised.value)


def test_what_is_as_it_was_is_read_though_it_was_written_again(path):
    change_header()(path)
    change_values()(path)
    seal(path)
    assert number_of(path) == 1


@pytest.mark.promise(
    "code in a checkpoint, or in a file of styles",
    "it is never run, also with `weights_only=False`; no error advises to run it",
)
@pytest.mark.parametrize(
    "name", ["values.json", "values.pt", ".metadata", "__0_0.distcp", "shard-00002-model-00001-of-00001.safetensors"]
)
def test_code_in_a_checkpoint_is_not_run(name, path, tmp_path):
    malice = pickle.dumps(Malice(tmp_path / "ran"))
    (path / name).write_bytes(malice)
    if name.startswith(("values.json", "shard")):
        with pytest.raises(UserError, match="cannot be read as a checkpoint"):
            number_of(path)
    else:
        assert number_of(path) == 1
    assert not (tmp_path / "ran").exists()
    pickle.loads(malice)  # the control: it would have been
    assert (tmp_path / "ran").exists()


def test_a_checkpoint_of_one_file_is_named_as_what_it_is(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
    with pytest.raises(UserError, match=r"old.ckpt cannot be read .*: it is one file, and checkpoints are directories"):
        load(tmp_path / "old.ckpt")


@pytest.mark.promise("a named pipe, a device, a socket or a folder in place of a file")
@not_on_windows
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_in_it_is_refused_and_not_waited_for(make, which, path):
    file = sorted(path.iterdir())[which]
    file.unlink()
    make(file)
    words = rf"x.ckpt cannot be read as a checkpoint: it is a .*, and no file: .*{file.name}"
    with pytest.raises(UserError, match=words):
        whole(load(path))
