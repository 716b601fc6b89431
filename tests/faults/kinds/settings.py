"""Files of settings: a run's settings.yaml, and what --config names."""

from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.faults.case import Case
from tests.faults.kinds.damage import damage_bytes, not_a_file
from tests.faults.known import ONE, words

HUGE = ("size", "width", "latent", "batch_size", "seed", "rate", "gamma", "ema", "log_every", "sample_every", "faces")
VALUES: list[Any] = [None, True, False, 0, 1, 2, -1, 1.5, "", "a", [], [1, 2], {}, {"a": 1}, [[[]]], "auto", "null"]
VALUES += ["é", float("nan"), float("inf"), "\x1b[31m", "2020-01-01", [None], {"class_path": "os.getcwd"}, "x" * 2000]
TEXTS = {
    "tabs": "\tsize: 16\n",
    "a config in it": "config: keep/notes.txt\n",
    "itself as config": "config: runs/001-r3gan-faces/settings.yaml\n",
    "a tag": "seed: !!python/object/apply:os.getcwd []\n",
    "another tag": "seed: !nothing 3\n",
    "a date": "seed: 2020-01-01\n",
    "an alias of nothing": "seed: *nothing\n",
    "merged": "base: &b {seed: 3}\n<<: *b\n",
    "a colon": "seed: 3: 4\n",
    "a list": "- a\n- b\n",
    "a number": "3\n",
    "two documents": "---\nseed: 3\n---\nseed: 4\n",
    "a mark of byte order": "\ufeffseed: 3\n",
    "a NUL": "seed: \0\n",
    "an escape": 'out: "\\e[2J"\n',
    "deep lists": "seed: " + "[" * 3000 + "]" * 3000 + "\n",
    "deep mappings": "seed: " + "{a: " * 3000 + "1" + "}" * 3000 + "\n",
    "a long number": "seed: " + "9" * 6000 + "\n",
    "a sexagesimal number": "seed: 1:30:00\n",
    "a hostile run": "run: [a]\n",
    "no run": "run:\n",
    "a run that is a number": "run: 3\n",
    "a run in a file that is none": "run: keep/notes.txt:f\n",
    "aliases of aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{n}: &{n} [{','.join([f'*{m}'] * 9)}]\n" for m, n in zip("abcdefgh", "bcdefghi", strict=True)),
    "a key that is a list": "? [a, b]\n: 3\n",
    "a key that is a number": "3: 4\n",
    "an unknown key": "nothing: 4\n",
    "dotted": "seed.deep: 4\n",
    "help": "help: true\n",
    "resume": "resume: auto\n",
    "a strategy": "strategy: zero3@9,*=nothing\n",
    "list_runs": "list_runs: true\n",
}


def damaged_settings(case: Case) -> None:
    """A run's settings or a --config file, edited, and the commands that read it."""
    what = case.chance.choice(("config", "config", "sample", "evaluate", "export", "resume", "resume"))
    run = case.copy("folder" if what == "evaluate" else "faces")
    settings = run / "settings.yaml"
    if what == "config":
        Path("my.yaml").write_text(settings.read_text().replace("devices: 1\n", ""))
        settings = Path("my.yaml")
    case.say(f"{settings}:", edit(settings, case.chance))
    if what == "config":
        tail = ["--dry-run"] if case.chance.random() < 0.6 else [*ONE, "--max-steps", "1"]
        case.run("fit", "--config", settings, *tail, "--workers", "0")
        return
    which = case.chance.choice((run, run, "auto"))
    if what == "resume" and not settings.is_file():
        which = run  # auto would begin a run of the default size
    more = ["--dry-run"] if what == "resume" and case.chance.random() < 0.3 else []
    case.run(what, *words(what, which), *more)


def edit(path: Path, chance: Random) -> str:
    """Change the text, the values or the file itself, and say what."""
    text = path.read_text()
    way = chance.randrange(10)
    if way == 0:
        return not_a_file(path, chance)
    if way == 1:
        return damage_bytes(path, chance)
    if way <= 4:
        name = chance.choice(list(TEXTS))
        place = chance.choice(("alone", "first", "last", "last"))
        added = TEXTS[name]
        path.write_text({"alone": added, "first": added + text, "last": text + added}[place])
        return f"{name}, {place}"
    lines = text.splitlines()
    where = chance.randrange(len(lines))
    key = lines[where].partition(":")[0]
    if way == 5:
        match chance.choice(("without", "twice", "indented", "cut", "joined")):
            case "without":
                del lines[where]
            case "twice":
                lines.insert(where, lines[where])
            case "indented":
                lines[where] = " " + lines[where]
            case "cut":
                lines[where] = lines[where][: chance.randrange(len(lines[where]))]
            case "joined":
                lines[where : where + 2] = [" ".join(lines[where : where + 2])]
        path.write_text("\n".join(lines) + "\n")
        return f"line {where} ({key}) changed: {lines[max(0, where - 1) : where + 2]}"
    values = [*VALUES, *([10**6, 10**12, 2**63, 10**30, 1e308, -(10**30)] if key in HUGE else [])]
    value = chance.choice(values)
    path.write_text(yaml.safe_dump({**yaml.safe_load(text), key: value}, sort_keys=False))
    return f"{key}: {value!r}"
