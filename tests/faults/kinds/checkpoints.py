"""Checkpoints: bytes, files, headers and values damaged or exchanged; then every command that reads one."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from gan.files.disk import regular
from gan.files.errors import UserError
from gan.files.values import VALUES, unsealed
from tests.faults import rules
from tests.faults.case import Case
from tests.faults.child import Ended
from tests.faults.kinds.damage import damage_bytes, not_a_file
from tests.faults.known import BY, LAST, made, reference, words
from tests.support.saved import seal, tensors, values_of

LEAVES: list[Any] = [None, 0, 1, -1, 10**18, 0.5, float("nan"), "", "a", [], {}, True, {"$tuple": []}, {"$set": [[]]}]
LEAVES += [{"$tensor": ["values/random_states/0/torch", "U8", [3]]}, {"$share": ["x", "F32", [10**15]]}, {"$x": 1}]
HEADERS = ("dtype", "dtype", "shape", "huge", "huge length", "offsets", "start", "start kind", "rename", "exchange")
HEADERS += ("no metadata", "no starts", "metadata", "list", "deep", "empty")


def damaged_checkpoints(case: Case) -> None:
    """Damage one of a run's two checkpoints, and give the run to a command.

    Sometimes whoever has damaged the tensors' files knows the checksums too. No reader can notice that; all other
    rules hold.
    """
    name = case.chance.choice(("faces", "faces", "sharded", "sharded", "folder"))
    run = case.copy(name)
    one, two = (run / "checkpoints" / f"step-{step:06d}.ckpt" for step in (1, 2))
    damaged, whole = (two, one) if case.chance.random() < 0.8 else (one, two)
    case.say(damage(damaged, whole, case.chance))
    forged = case.chance.random() < 0.25 and forge(damaged)
    if forged:
        case.say("with new checksums")
    give(case, name, case.chance.choice(BY[name]), case.chance.choice((run, "auto", damaged)), whole, forged)


def forge(checkpoint: Path) -> bool:
    """Write new checksums of the tensors' files. False if they are no files, or if values.json is damaged."""
    try:
        for file in checkpoint.iterdir():
            regular(file)
        unsealed((checkpoint / VALUES).read_bytes())
        seal(checkpoint)
    except (UserError, OSError, OverflowError, MemoryError):
        return False
    return True


def give(case: Case, name: str, what: str, which: object, whole: Path, forged: bool = False) -> None:
    """Give a known run to a command: it refuses, or takes a whole checkpoint, or all is right."""

    def right(ended: Ended) -> Iterable[str]:
        if ended.status == 0 and not forged:
            try:
                step, result = made(what, ended)
            except (OSError, TypeError, AttributeError, KeyError, IndexError) as error:
                yield f"it ended well, and made nothing that can be compared: {error!r}"
                return
            if result != reference(case.known / name, what, step):
                yield f"a damaged checkpoint was taken in silence: {what} from step {step} is another one"
            if str(which).endswith(".ckpt") and not str(which).endswith(f"{step:06d}.ckpt"):
                yield f"{which} was asked for, and step {step} was taken"
        # Whatever came of it, the newest whole checkpoint is there, or a newer whole one.
        newer = whole.with_name(f"step-{LAST:06d}.ckpt")
        replaced = what == "resume" and ended.status == 0 and _reads(newer)
        if not replaced and not _same(whole, case.known / name / whole):
            yield f"{whole} is no longer whole, and there is no newer one"

    case.run(what, *words(what, which), check=right)


def _same(one: Path, other: Path) -> bool:
    return one.is_dir() and rules.files(one) == rules.files(other)


def _reads(checkpoint: Path) -> bool:
    try:
        return bool(tensors(checkpoint))
    except UserError:
        return False


# ---- ways ----


def damage(checkpoint: Path, other: Path, chance: Random) -> str:
    """Damage a checkpoint. `other` is one of another step."""
    files = sorted(checkpoint.iterdir())
    shards = [file for file in files if file.suffix == ".safetensors"]
    ways = (
        [lambda: damage_bytes(chance.choice(files), chance)] * 6
        + [lambda: not_a_file(chance.choice(files), chance)] * 2
        + [lambda: _from_other(chance.choice(files), other)] * 2
        + [lambda: _exchange_files(shards, chance)] * 2
        + [lambda: _header(chance.choice(shards), chance)] * 6
        + [lambda: _exchange_tensors(chance.choice(shards), chance)] * 3
        + [lambda: _values(checkpoint, chance)] * 4
        + [lambda: not_a_file(checkpoint, chance), lambda: _without_most(files, chance), lambda: _stranger(checkpoint)]
    )
    return chance.choice(ways)()


def _from_other(file: Path, other: Path) -> str:
    shutil.copy(other / file.name, file)
    return f"{file} is that of {other.name}"


def _exchange_files(shards: list[Path], chance: Random) -> str:
    """The files of two ranks, or if there is one, that under the name of another rank."""
    one = chance.choice(shards)
    two = (
        one.with_name(one.name.replace("shard-00001", "shard-00003"))
        if len(shards) == 1
        else next(each for each in shards if each != one)
    )
    content = one.read_bytes(), two.read_bytes() if two.exists() else None
    if chance.random() < 0.3 or content[1] is None:
        two.write_bytes(content[0])
        return f"{two} is a copy of {one.name}"
    one.write_bytes(content[1])
    two.write_bytes(content[0])
    return f"{one} and {two.name} exchanged"


def _without_most(files: list[Path], chance: Random) -> str:
    kept = chance.choice(files)
    for file in files:
        if file != kept:
            file.unlink()
    return f"all files removed but {kept}"


def _stranger(checkpoint: Path) -> str:
    (checkpoint / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0no header at all")
    return f"a stranger's file in {checkpoint}"


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(file: Path, header: Any, rest: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + rest)


def _header(file: Path, chance: Random) -> str:
    """Edit the JSON header of a safetensors file."""
    header, rest = read_header(file)
    about = header["__metadata__"]
    names = [name for name in header if name != "__metadata__"]
    name, another = chance.choice(names), chance.choice(names)
    starts = {key: json.loads(value) for key, value in about.items() if value.startswith("{")}
    way = chance.choice(HEADERS)
    match way:
        case "dtype":
            header[name]["dtype"] = chance.choice(("I32", "F16", "F64", "U32", "BF16", "X", "", "F8_E4M3"))
        case "shape":
            header[name]["shape"] = chance.choice(([], [1], [-1], [0], [1, *header[name]["shape"]], "x", [2**40]))
        case "huge":
            header[name] |= {"shape": [10**15], "data_offsets": [0, 4 * 10**15]}
        case "offsets":
            header[name]["data_offsets"] = chance.choice((header[another]["data_offsets"], [0, 4], [4, 0], [-4, 0], []))
        case "start":
            starts["DCP_SHARDING_INFO"][name]["saved_offsets"] = chance.choice(([1], [-1], [10**18], [], [0, 0]))
        case "start kind":
            starts["DCP_SHARDING_INFO"][name] = chance.choice((None, [], "x", {}, 3, {"saved_offsets": "x"}))
        case "rename":
            header[f"{name}.x"] = header.pop(name)
        case "exchange":
            header[name], header[another] = header[another], header[name]
        case "no metadata":
            del header["__metadata__"]
        case "no starts":
            del about["DCP_SHARDING_INFO"]
        case "list":
            header = [header]
        case "deep":
            about["DCP_SHARDING_INFO"] = "[" * 100_000
        case "empty":
            header = {}
        case "metadata":
            key = chance.choice(list(about))
            about[key] = chance.choice(("", "{}", "[]", "null", "x", "1"))
        case "huge length":
            file.write_bytes((2**40).to_bytes(8, "little") + file.read_bytes()[8:])
    if way in ("start", "start kind"):
        about |= {key: json.dumps(value) for key, value in starts.items()}
    if way != "huge length":
        write_header(file, header, rest)
    return f"{file}: header, {way} of {name} (and {another})"


def _exchange_tensors(file: Path, chance: Random) -> str:
    """The elements of two tensors of one size, exchanged."""
    header, rest = read_header(file)
    places: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            places.setdefault((about["dtype"], end - begin), []).append((name, begin, end))
    pairs = [each for each in places.values() if len(each) > 1]
    if not pairs:
        return damage_bytes(file, chance)
    (one, a, b), (two, c, d) = chance.sample(chance.choice(pairs), 2)
    content = bytearray(rest)
    content[a:b], content[c:d] = rest[c:d], rest[a:b]
    write_header(file, header, bytes(content))
    return f"{file}: {one} and {two} exchanged"


def _values(checkpoint: Path, chance: Random) -> str:
    """Edit one value of values.json, anywhere in its tree."""
    tree = values_of(checkpoint)
    places: list[tuple[Any, Any, str]] = []

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict | list):
            for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
                places.append((node, key, f"{path}/{key}"))
                walk(value, f"{path}/{key}")

    walk(tree, "")
    node, key, path = chance.choice(places)
    if chance.random() < 0.25:
        del node[key]
        what = "taken out"
    else:
        node[key] = chance.choice(LEAVES)
        what = f"now {node[key]!r}"
    (checkpoint / VALUES).write_text(json.dumps(tree))
    return f"{checkpoint / VALUES}: {path} {what}"
