"""Networks as files: what they hold, that plain torch loads them, and what the command says."""

import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._pytree import tree_map_only
from torchvision.transforms.functional import pil_to_tensor

from gan import GanModule, Phase, Player, sample
from gan import export as command
from gan.app.exporting import card
from gan.app.page import compared, run_tables
from gan.app.page.table import sample_cell
from gan.app.run.reopen import open_run
from gan.export import _published, export, main, networks, take_from_run
from gan.files.errors import UserError
from gan.runs import build
from nets.published.pickles import read
from tests.support import commands, opening
from tests.support.saved import read_checkpoint, write_checkpoint
from tests.unit.gan.runs.test_pictures import put


@pytest.fixture(scope="module")
def written(shared_copy):
    """The trained SEAN, written once: its folder, and the files' paths."""
    return shared_copy, export(str(shared_copy))


@pytest.fixture(scope="module")
def averaged_run(tmp_path_factory):
    """A game with a player that keeps an average."""
    root = tmp_path_factory.mktemp("averaged")
    return opening.train(root / "runs", "r3gan-faces", ema=1000.0, **opening.NARROW)


@pytest.fixture
def averaged(averaged_run, tmp_path):
    return shutil.copytree(averaged_run, tmp_path / "runs" / averaged_run.name)


@pytest.fixture(scope="module")
def published_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    settings = {**opening.SMALL, "upsamplings": 5, "held_out": 2, "perceptual": "off", "max_steps": 1, "save_every": 1}
    return opening.train(root / "runs", "sean-folder", data=opening.drawn(root / "data", 6, 32), **settings)


def checkpoint(run):
    (path,) = run.glob("checkpoints/*.ckpt")
    return read_checkpoint(path)


def about(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def same(found, saved, name):
    """The weights of a file are those of a player in a checkpoint, every key and none besides."""
    wanted = {key.removeprefix(f"{name}."): value for key, value in saved.items() if key.startswith(f"{name}.")}
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], value) for key, value in wanted.items())


def test_every_player_has_a_file_of_its_weights_whose_metadata_say_where_they_are_from(written):
    sean, paths = written
    folder, saved = sean / "export" / "step-000002", checkpoint(sean)["state_dict"]
    names = ("encoder", "generator", "discriminator")
    assert paths == [*(folder / f"{name}.safetensors" for name in names), folder / "README.txt"]
    for name, path in zip(names, paths, strict=False):
        same(load_file(path), saved, name)
    known = {"run": sean.name, "recipe": "sean-faces", "game": "Sean", "player": "discriminator", "step": "2"}
    known |= {"weights": "raw", "network": "nets.discriminator.MultiScaleDiscriminator", "torch": torch.__version__}
    assert known.items() <= about(paths[2]).items() and about(paths[2]).keys() >= {"coordinated-gans", "format"}


def test_averaged_weights_are_those_of_the_checkpoint_and_raw_ones_differ(averaged):
    saved, found, said = checkpoint(averaged), {}, {}
    for weights, folder in (("ema", "step-000002"), ("raw", "step-000002-raw")):
        *_, readme = export(str(averaged), weights=weights)
        said[weights] = {line.partition(".safetensors: ")[0]: line for line in readme.read_text().splitlines()}
        path = averaged / "export" / folder / "generator.safetensors"
        found[weights] = load_file(path)
        assert about(path)["weights"] == weights
        assert about(path.with_name("discriminator.safetensors"))["weights"] == "raw"
    assert said["ema"]["generator"].endswith("averaged weights (EMA)")
    assert said["ema"]["discriminator"].endswith("raw weights, as they were trained")
    same(found["raw"], saved["state_dict"], "generator")
    average = saved["players"]["generator"]["ema"]
    assert average and all(torch.equal(found["ema"][name], value) for name, value in average.items())
    assert any(not torch.equal(found["raw"][name], value) for name, value in average.items())


def test_a_run_of_64_true_is_written_in_64_bits_and_shown_in_32(averaged, tmp_path):
    (path,) = averaged.glob("checkpoints/*.ckpt")
    wide = partial(tree_map_only, torch.Tensor, lambda value: value.double() if value.is_floating_point() else value)
    write_checkpoint(path, saved := wide(read_checkpoint(path)))
    opening.rewrite(averaged, precision="64-true")
    export(str(averaged), tmp_path, weights="raw", card=True, published=True)
    found = load_file(tmp_path / "generator.safetensors")
    assert all(torch.equal(value, saved["state_dict"][f"generator.{name}"]) for name, value in found.items())
    assert (tmp_path / "samples.png").exists()
    assert sample.main([str(averaged), "show", "--weights", "raw", "-o", str(tmp_path / "raw.png")]) == 0


class Odd(GanModule):
    """All odd cases: the player is an inner module, a layer has two names, there are float64 and buffers."""

    def __init__(self):
        super().__init__()
        layer = spectral_norm(nn.Linear(3, 3))
        self.body = nn.ModuleDict({"net": nn.Sequential(layer, nn.BatchNorm1d(3), layer)})

    def configure_players(self):
        yield Player("painter", self.body["net"], torch.optim.SGD, ema=0.9)

    def configure_phases(self):
        yield Phase("painting", lambda batch: batch.sum(), learners="painter")


def odd(path):
    """A checkpoint of such a game, and what is in it."""
    game = Odd().double()
    for parameter in game.parameters():
        parameter.data.add_(torch.rand_like(parameter) * 1e-12)  # what float32 cannot hold
    average = {name: parameter.detach() + 1 for name, parameter in game.body["net"].named_parameters()}
    saved = {"state_dict": game.state_dict(), "players": {"painter": {"ema": average}}}
    write_checkpoint(path, {**saved, "game": "Odd", "global_step": 1})
    return game, average


def test_odd_networks_are_exported_bit_for_bit(tmp_path):
    path = tmp_path / "odd.ckpt"
    game, average = odd(path)
    for weights in ("ema", "raw"):
        (found,) = opening.exported(Odd(), path, weights)  # a game in float32: its format does not matter
        assert found.weights == weights and found.state.keys() == game.body["net"].state_dict().keys()
        expected = Odd().double().body["net"]
        expected.load_state_dict(game.body["net"].state_dict())
        if weights == "ema":
            for name, tensor in average.items():
                expected.get_parameter(name).data.copy_(tensor)
        assert all(torch.equal(found.state[key], tensor) for key, tensor in expected.state_dict().items())
        assert {tensor.dtype for tensor in found.state.values()} == {torch.float64, torch.int64}
        assert len({tensor.data_ptr() for tensor in found.state.values()}) == len(found.state)
        assert "0.parametrizations.weight.original" in found.state


def test_each_player_has_a_file_of_its_own_that_every_system_takes():
    game = Odd()
    game.players = {name: Player(name, game.body["net"]) for name in ("G", "g", "a/b", "aux")}
    assert [each.file for each in networks(game, ())] == ["G", "g_", "a_b", "_aux"]


def test_what_is_no_tensor_is_refused():
    class Noting(nn.BatchNorm1d):
        def get_extra_state(self):
            return {"a": 1}

    game = Odd()
    game.body["net"][1].__class__ = Noting
    game.assemble()
    with pytest.raises(UserError, match=r"player 'painter': '1._extra_state' of its state dict is no tensor but dict"):
        networks(game, ())


def test_the_readme_says_how_to_load_them_and_that_is_so(written):
    sean, (*_, readme) = written
    text = readme.read_text()
    assert text.startswith(f"{sean.name}, step 2: one file a player. To read the weights takes torch")
    network = open_run(str(sean)).run.game.encoder.requires_grad_(False)
    for weight in network.parameters():
        weight.zero_()
    there, names = repr(str(readme.parent / "encoder.safetensors")), {"network": network}
    for line in (line.strip() for line in text.splitlines() if line.startswith("    ")):
        exec(line.replace('"encoder.safetensors"', there), names)
    same(network.state_dict(), checkpoint(sean)["state_dict"], "encoder")
    for player in ("encoder", "generator", "discriminator"):
        assert f"\n{player}.safetensors: nets." in text
    assert "raw weights" in text and "averaged" not in text and "latest_net" not in text
    has = any("parametrizations" in key for key in load_file(readme.parent / "discriminator.safetensors"))
    assert has == ("discriminator: keys with `parametrizations`" in text)


def test_exported_again_it_is_written_over_and_nothing_else_is_left(copy):
    written = export(str(copy))
    for path in written:
        path.write_bytes(b"old")
    assert export(str(copy)) == written
    assert sorted(written) == sorted((copy / "export" / "step-000002").iterdir())
    same(load_file(written[0]), checkpoint(copy)["state_dict"], "encoder")


def test_a_sean_begins_with_what_another_one_wrote(published_run, tmp_path):
    (published_run.parent.parent / "data" / "LICENSE.txt").write_text("\nODbL 1.0\nmore\n")
    export(str(published_run), tmp_path, published=True, card=True)
    assert "| licence of the data | ODbL 1.0 |" in (tmp_path / "README.md").read_text()
    settings = yaml.safe_load((published_run / "settings.yaml").read_text())
    typed = {name: settings[name] for name in (*opening.SMALL, "upsamplings", "held_out", "perceptual", "data")}
    typed |= {"batch_size": 4}
    game = build("sean", **typed, seed=1, from_=str(tmp_path)).game
    for name in ("encoder", "generator", "discriminator"):
        written, found = load_file(tmp_path / f"{name}.safetensors"), getattr(game, name).state_dict()
        assert all(torch.equal(found[key], value) for key, value in written.items())
    with pytest.raises(UserError, match="Spade has no published weights to begin with; leave --from out"):
        build("sean", **typed | {"style": None}, from_=str(tmp_path))


def test_a_run_of_r3gan_is_written_as_a_published_file(averaged, tmp_path):
    *_, readme = export(str(averaged), tmp_path, published=True)
    assert "network-snapshot.pkl: as the published code loads them" in readme.read_text()
    found = read(tmp_path / "network-snapshot.pkl")
    for name, player in (("G", "generator"), ("G_ema", "generator"), ("D", "discriminator")):
        wanted = load_file(tmp_path / f"{player}.safetensors")
        assert all(torch.equal(found[name].weights[f"Model.{key}"], value) for key, value in wanted.items())


def test_a_training_begins_with_a_run_in_place_of_a_published_file(averaged, published_run, tmp_path, capsys):
    """Its file is what gan.export writes; where there are several, the folder is taken. A size that is typed stays."""
    made = averaged / "export" / "step-000002-from" / "network-snapshot.pkl"
    for typed, file in (
        (averaged, made),
        (averaged / "checkpoints" / "step-000002.ckpt", made),
        (published_run, published_run / "export" / "step-000001-from"),
    ):
        run = "sean" if typed == published_run else "r3gan"
        settings = Namespace(from_=str(typed), run=run, size="16")
        assert take_from_run(settings) == ["--from", str(file)] and settings.from_ == str(file)
        assert capsys.readouterr().out.endswith(f": --from {file}\n")
    settings = Namespace(from_=str(published_run), run="sean", size="16", width=64, hidden=128, pixels=0.0)
    width, hidden = (open_run(str(published_run)).settings[name] for name in ("width", "hidden"))
    assert take_from_run(settings, ["--from", "auto", "--hidden=128"])[2:] == ["--width", str(width)]
    assert (settings.width, settings.hidden, settings.pixels) == (width, 128, 0.0) and hidden not in (64, 128)
    with pytest.raises(UserError, match="is a run of sean-folder, whose networks r3gan does not have"):
        take_from_run(Namespace(from_=str(published_run), run="r3gan"))
    with pytest.raises(UserError, match="begins a new run, and --resume goes on with one"):
        take_from_run(Namespace(from_=str(averaged), run="r3gan", resume="auto"))
    export(str(averaged), tmp_path, published=True)
    found, wanted = (read(path)["G"].weights for path in (made, tmp_path / made.name))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    for typed, run in ((averaged / "generator.safetensors", averaged), (tmp_path / "x.safetensors", "RUN")):
        with pytest.raises(UserError, match=f"is no published file; type --from {run}"):
            take_from_run(Namespace(from_=str(typed)))
    assert take_from_run(Namespace(from_=str(tmp_path))) == take_from_run(Namespace()) == []


@pytest.mark.slow
def test_a_sean_of_fewer_upsamplings_than_published_ones_begins_another_one(tmp_path):
    rules = {**opening.SMALL, "held_out": 2, "perceptual": "off", "batch_size": 4}
    rules["data"] = opening.drawn(tmp_path / "data", 6, 32)
    first = opening.train(tmp_path / "runs", "sean-folder", max_steps=1, **rules)
    settings = Namespace(from_=str(first), run="sean", upsamplings=5, size=256)
    assert take_from_run(settings)[2:] == ["--upsamplings", "2", "--size", "32"]
    settings = Namespace(from_=str(first), run="sean", upsamplings=2, size=256)
    assert take_from_run(settings, ["--size=256"])[2:] == []
    game, saved = build("sean", from_=settings.from_, **rules).game, open_run(str(first)).run.game
    for one, other in zip(game.children(), saved.children(), strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_pictures_get_the_size_of_the_run_to_begin_with_also_if_they_are_no_square(tmp_path):
    rules = dict(batch_size=4, held_out=0.25, workers=0, max_steps=1, data=classes(tmp_path / "data", "RGB", 12))
    first = opening.train(tmp_path / "runs", "stylegan2", width=0.005, mapping=1, size="12x16", **rules)
    settings = Namespace(from_="auto", run="stylegan2", size=None, out=str(first.parent))
    assert take_from_run(settings)[2:] == ["--size", "12x16"] and settings.size == "12x16"
    game = build("stylegan2", from_=settings.from_, size="12x16", **rules).game
    saved = open_run(str(first)).run.game.generator.state_dict()
    assert game.generator.size == (16, 12)
    torch.testing.assert_close(game.generator.state_dict(), saved, rtol=0, atol=0)
    for kind in ("cat", "dog"):  # pictures of another size: it is that of the file
        put(tmp_path / "large" / kind / "1.png", (40, 32), "RGB", (1, 2, 3))
    rules |= dict(data=str(tmp_path / "large"), held_out=0, batch_size=2)
    assert build("stylegan2", from_=settings.from_, **rules).game.generator.size == (16, 16)


def classes(folder, mode, count):
    for number in range(count):
        put(folder / ("cat", "dog")[number % 2] / f"{number}.png", (16, 16), mode, (20 * number, 0, 99))
    return str(folder)


def test_a_run_of_stylegan2_with_classes_and_opacity_begins_from_what_another_one_wrote(tmp_path):
    typed = dict(
        data=classes(tmp_path / "data", "RGBA", 12), channels=4, batch_size=4, held_out=0.25, workers=0, max_steps=1
    )
    first = build("stylegan2", width=0.005, mapping=1, **typed).game
    for weight in first.generator.parameters():
        torch.nn.init.normal_(weight)
    for name, file in _published(first).items():
        file.write(tmp_path / name)
    game = build("stylegan2", from_=str(tmp_path / "network-snapshot.pkl"), **typed).game
    assert (game.generator.channels, game.generator.classes) == (4, 2)
    z, label = torch.randn(3, 512), torch.eye(2)[[0, 1, 0]]
    pictures = [each.generator.eval()(z, label) for each in (first, game)]
    assert torch.equal(*pictures)
    assert torch.equal(*(each.discriminator(pictures[0], label) for each in (first, game)))


def test_the_command_writes_and_says_what(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy.parent.parent)
    assert main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"runs/{copy.name}/export/step-000002/encoder.safetensors"
    assert len(said) == 4 and all(Path(line).is_file() for line in said)
    assert main([f"runs/{copy.name}", "--weights", "raw", "--to", "mine"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "mine/README.txt"


def test_what_cannot_be_done_is_said_and_nothing_is_written(copy, tmp_path, capsys):
    (tmp_path / "file").touch()
    reason = r"do not have the published form. SEAN's published encoder .* as gan.fit sean does; or leave --p"
    for words, said in ((["--published"], reason), (["--to", f"{tmp_path}/file/there"], "choose a folder with --to")):
        assert main([str(copy), *words]) == 2
        assert re.search(said, capsys.readouterr().err)
    with pytest.raises(UserError, match="--published: Identity has no published form; leave it out"):
        _published(torch.nn.Identity())
    assert not (copy / "export").exists()


def test_a_disk_that_is_full_is_said_and_no_half_file_stays(copy, monkeypatch, capsys):
    def full(state, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(command, "save_file", full)
    assert main([str(copy)]) == 2
    assert "step-000002': No space left on device; choose a folder with --to" in capsys.readouterr().err
    assert not list((copy / "export" / "step-000002").iterdir())


# ---- cards, and programs ----


def typed_in(readme):
    """The Python of a card."""
    return re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)


def test_a_card_says_how_plain_torch_loads_the_networks_and_so_it_does(averaged, tmp_path):
    made = tmp_path / "hub"
    assert main([str(averaged), "--card", "--licence", "CC BY 4.0", "--format", "torch", "--to", str(made)]) == 0
    names = {"README.md", "config.json", "samples.png", "generator.pt2"}
    assert {path.name for path in made.iterdir()} == names | {"generator.safetensors", "discriminator.safetensors"}
    text = (made / "README.md").read_text()
    assert text.startswith("---\nlicense: cc-by-4.0  # of the data\nlibrary_name: pytorch\n")
    assert "| licence of the data | CC BY 4.0 |" in text
    assert "16 to train on, 4 held out" in text and "distance of drawn from held-out faces" in text
    by_class, program = typed_in(made / "README.md")
    assert len(by_class.splitlines()) <= 16 and "![Samples that are drawn from noise](samples.png)" in text
    assert "nothing else" in text and "To make the network also takes the packages `nets` and `gan`" in text

    # As a program: with torch alone. The file of weights needs no line of ours either.
    check = "\nimport sys; print([name for name in ('gan', 'nets', 'lightning') if name in sys.modules])\n"
    torch.save(opened := outputs_of(averaged), tmp_path / "wanted.pt")
    more = f"\nz, wanted = torch.load({str(tmp_path / 'wanted.pt')!r})\nprint(float((network(z) - wanted).abs().max()))"
    load = "\nfrom safetensors.torch import load_file; print(sorted(load_file('generator.safetensors')))"
    # Then, in the same process, with nets and gan: the weights of the file.
    code = program + more + load + check + f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + by_class + more
    code = "import sys; [sys.modules.pop(name) for name in [*sys.modules] if name.startswith('lightning')]\n" + code
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = commands.run("-c", code + check, cwd=made, env=plain)
    about = "The network takes `z` [B, 8]. It gives [B, 3, 16, 16], pictures in about -1 to 1, which the code clamps.\n"
    assert text.count(about) == 2 and card.TRUNCATION not in text and "dropout and no truncation." in text
    with Image.open(made / "generator.png") as picture:
        assert (picture.size, picture.mode) == ((16, 16), "RGB")
    size, far, keys, others, own_size, own_far, own_others = ran.stdout.splitlines()
    assert size == own_size == "torch.Size([2, 3, 16, 16])" and float(far) < 1e-5 and float(own_far) == 0
    assert others == "[]" and own_others == "['gan', 'nets']" and opened[1].std() > 0
    assert keys == str(sorted(load_file(made / "generator.safetensors")))


def test_a_card_names_the_classes_and_types_labels_as_the_network_takes_them(tmp_path, monkeypatch, capsys):
    small = dict(width=0.005, mapping=1, held_out=0.5, workers=0, max_steps=1)
    run = opening.train(tmp_path / "runs", "stylegan2", data=classes(tmp_path / "data", "RGB", 16), **small)
    said = "config auto, kimg 0.004, ema-kimg 1.25, rate 0.0025, gamma 0.0128, path 2, mixing 0.9, width 0.005, "
    assert f"settings: {said}mapping 1, size 16x16, batch-size 4\n" in capsys.readouterr().out
    assert f"\nsettings\n  {said}" in (run / "game.txt").read_text()
    opened = open_run(str(run))
    table = run_tables.over_time(opened)
    assert table.note == "The same seeds at every step, from the first 4 rows of each grid."
    assert table.columns == [f"{('cat', 'dog')[k % 2]}: seeds {k}, …" for k in range(8)]
    assert [row.title for row in table.rows] == [f"row {number}" for number in (1, 2, 3, 4)]
    words = [[cell.words for cell in row.cells] for row in table.rows]
    assert words == [[f"seed {8 * row + column}" for column in range(8)] for row in range(4)]
    beside = compared.pictures([opened, opened], ["one", "two"])
    assert set(beside.columns) == {""} and beside.rows[1].title == "cat: seeds 0, …: two"
    assert [cell.words for cell in beside.rows[1].cells] == [f"seed {8 * row}" for row in range(8)]
    differs = compared.differences([opened, replace(opened, run=replace(opened.run, chosen={}))], ["one", "two"])
    gamma = next(row for row in differs.rows if row.title == "gamma")
    assert [cell.words for cell in gamma.cells] == ["0.0128 (not typed)", "none"]
    shutil.copytree(run, typed := run.parent / "002-typed")
    opening.rewrite(typed, size=16, gamma=0.0128)
    same = compared.differences([opened, open_run(str(typed))], ["one", "two"])
    assert [[cell.words for cell in row.cells] for row in same.rows] == [["all the same"] * 2]
    assert compared.settings_of(opened)["changed while it trained"] == "no"
    (run / "trained.json").write_text('{"settings until step 0": "augment off", "settings until step 1": "kimg 2"}')
    assert compared.settings_of(opened)["changed while it trained"] == "until step 0: augment off"
    near, image = run_tables.nearest(opened), run_tables.held_out(opened, 8)["image"]
    assert near.columns == [f"seed {number}" for number in range(8)]
    drawn = opened.run.game.numbered(torch.arange(8), image)
    made = [sample_cell(each).pictures[0].tobytes() for each in drawn]
    assert [cell.pictures[0].tobytes() for cell in near.rows[0].cells] == made
    name, _, _ = near.rows[1].cells[0].words.rpartition(": ")
    picture = opened.run.data.train[opened.run.data.train.sample_names.index(name.encode())]["image"]
    assert near.rows[1].cells[0].pictures[0].tobytes() == sample_cell(picture / 127.5 - 1).pictures[0].tobytes()
    shown = {row.title: row.cells[0].words for row in run_tables.settings(opened).rows}
    assert [shown[name] for name in ("gamma", "size", "width")] == ["0.0128 (not typed)", "16x16 (not typed)", "0.005"]
    export(str(run), tmp_path / "hub", card=True)
    about = (tmp_path / "hub" / "README.md").read_text()
    assert "The classes: 0 cat, 1 dog." in about and f"| settings | {said}" in about
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["classes"] == ["cat", "dog"]
    monkeypatch.chdir(tmp_path / "hub")
    code = typed_in(Path("README.md"))[0]
    capsys.readouterr()
    exec(code, {})
    assert "(torch.randn(2, 512), torch.eye(2)[[0, 0]])" in code
    assert "takes `z` [B, 512]; `label` [B, 2], 1 at the class and 0 elsewhere. It" in about
    assert card.TRUNCATION in about
    exec(code.replace("[[0, 0]]", "[[0, 1]], psi=0.7"), {})
    assert capsys.readouterr().out == 2 * "torch.Size([2, 3, 16, 16])\n"
    assert about.startswith("---\nlibrary_name")


LICENCES = {
    **{"CC0": "cc0-1.0", "CC0 1.0 Universal": "cc0-1.0", "CC BY-SA 4": "cc-by-sa-4.0", "ODbL 1.0": "odbl"},
    **{"MIT License": "mit", "Apache License 2.0": "apache-2.0"},
    **{"Mine: ask": "other mine-ask", "CC BY": "other cc-by"},  # of which version?
}


@pytest.mark.parametrize("typed", LICENCES)
def test_a_licence_that_the_hub_knows_has_its_name_there(typed):
    name, *own = LICENCES[typed].split()
    assert card._license(typed) == [f"license: {name}  # of the data", *(f"license_name: {each}" for each in own)]


@pytest.mark.slow
def test_a_card_loads_the_parts_of_a_player_that_the_game_calls(tmp_path, monkeypatch):
    small = dict(size=32, faces=4, held_out=2, batch_size=2, workers=0, max_steps=1, width=4, blocks=1)
    run = opening.train(tmp_path / "runs", "cyclegan-faces", **small)
    export(str(run), tmp_path / "hub", card=True, formats="torch,onnx")
    monkeypatch.chdir(tmp_path / "hub")
    Image.effect_noise((40, 50), 90).save("photo.png")  # the code makes it fit, and gray becomes colours
    with Image.open("photo.png") as photo:
        x = pil_to_tensor(photo.convert("RGB").resize((32, 32)))[None] / 127.5 - 1
    with torch.no_grad():
        wanted = open_run(str(run)).run.game.get_submodule("generators.to_a")(x)
    found, text = [], Path("README.md").read_text()
    assert text.count(card.SIZES[True]) == 4 and card.SIZES[False] not in text
    for code in typed_in(Path("README.md")):
        exec(code, known := {})
        if "generators.to_a" in code:
            found.append(known["found"])
    assert len(found) == 3 and wanted.shape == x.shape and wanted.std() > 0
    assert all((each - wanted).abs().max() < 1e-5 for each in found)


def outputs_of(run):
    """Some noise, and what the saved generator makes of it."""
    game = open_run(str(run)).run.game
    z = torch.randn(3, game.drawer.latent)
    with torch.no_grad():
        return z, game.drawer(z)


def test_sean_is_a_program_of_masks_and_codes(sean_run):
    """tests/unit/gan/app/exporting/test_programs.py writes such programs."""
    called = card.calls(open_run(str(sean_run)))
    assert list(called) == ["encoder", "generator"] and list(called["generator"].given) == ["onehot", "codes"]


def test_a_program_that_differs_is_refused(averaged, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(card, "_through_torch", lambda made, call, path: 2 * call.network(*call.values))
    assert main([str(averaged), "--format", "torch", "--to", str(tmp_path)]) == 2
    assert "the program of 'generator' is " in capsys.readouterr().err
    assert not list(tmp_path.glob("*.pt2"))
