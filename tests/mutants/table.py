"""The mistakes: in which file, which text becomes which, and which tests must fail then."""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str  # is in the file once
    new: str
    tests: str  # below tests/; they fail together


MUTANTS = (
    # What ranks share.
    Mutant(
        "the gradient of a sum over ranks is that of one rank",
        "gan/ranks.py",
        "return _Sum.apply(gradient, ctx.world), None",
        "return gradient, None",
        "unit/gan/test_ranks.py",
    ),
    Mutant(
        "a mean over ranks is a sum",
        "gan/ranks.py",
        "return sum(values) / _world().size if more_than_one() else values",
        "return sum(values) if more_than_one() else values",
        "unit/gan/test_ranks.py",
    ),
    Mutant(
        "own rows of a gathering are those of the first rank",
        "gan/ranks.py",
        "slice(before, before + len(rows))",
        "slice(0, len(rows))",
        "unit/gan/test_ranks.py",
    ),
    Mutant(
        "a forward that runs again starts from the last sum",
        "gan/ranks.py",
        "world, left = _world(), iter(sums)",
        "world, left = _world(), iter(sums[::-1])",
        "unit/gan/test_ranks.py",
    ),
    Mutant(
        "moments of a batch norm are those of one rank",
        "nets/norm.py",
        "    if not ranks.more_than_one():\n        return mean, variance, count",
        "    if True:\n        return mean, variance, count",
        "unit/nets/test_norm.py",
    ),
    Mutant(
        "a running variance is not unbiased",
        "nets/norm.py",
        "unbiased = variance * (count / (count - 1))",
        "unbiased = variance",
        "unit/nets/test_norm.py",
    ),
    Mutant(
        "a codebook follows the features of one rank",
        "nets/vqgan.py",
        "ranks.sum(torch.cat([chose.T @ rows.flatten(0, -2), chose.sum(0)[:, None]], 1))",
        "torch.cat([chose.T @ rows.flatten(0, -2), chose.sum(0)[:, None]], 1)",
        "ranks/test_vqgan.py",
    ),
    # Noise.
    Mutant(
        "noise follows the rank",
        "gan/noise.py",
        "else (self.first, self.rows)",
        "else (0, self.rows)",
        "unit/gan/test_noise.py",
    ),
    Mutant("two draws of a phase are the same", "gan/noise.py", "self.calls += 1", "pass", "unit/gan/test_noise.py"),
    Mutant(
        "two blocks of a draw are the same",
        "gan/noise.py",
        "+ number * 0xD1B54A32D192ED03 & MASK",
        "& MASK",
        "unit/gan/test_noise.py",
    ),
    Mutant(
        "dropout does not scale what it keeps",
        "gan/noise.py",
        "mul_(1 / (1 - p) if p < 1 else 0)",
        "mul_(1 if p < 1 else 0)",
        "unit/gan/test_noise.py",
    ),
    Mutant(
        "a pool tosses one coin for all images",
        "gan/pool.py",
        "coin = random.Random(seed)",
        "coin = random.Random(0)",
        "unit/gan/test_module.py",
    ),
    # Losses and networks.
    Mutant(
        "a generator lowers its score",
        "gan/losses.py",
        "    # Lim and Ye 2017, Tran et al. 2017.\n    return -fake.mean()",
        "    # Lim and Ye 2017, Tran et al. 2017.\n    return fake.mean()",
        "unit/gan/test_losses.py",
    ),
    Mutant(
        "R1 without its half",
        "gan/losses.py",
        "0.5 * slope.square().flatten(1)",
        "slope.square().flatten(1)",
        "unit/gan/test_losses.py",
    ),
    Mutant(
        "a gradient penalty between fakes and fakes",
        "gan/losses.py",
        "torch.lerp(fake.detach(), real.detach(), share)",
        "torch.lerp(fake.detach(), fake.detach(), share)",
        "unit/gan/test_losses.py",
    ),
    Mutant(
        "a norm moves in evaluation",
        "nets/spectral.py",
        "            if self.training:\n                self._iterate",
        "            if True:\n                self._iterate",
        "unit/nets/test_norm.py",
    ),
    Mutant(
        "the second derivative of a spectral norm has another sign",
        "nets/spectral.py",
        "alpha=-1",
        "alpha=1",
        "unit/nets/test_norm.py",
    ),
    Mutant(
        "bands of a mel spectrogram overlap by one too few",
        "nets/mel.py",
        "corners[:-2, None], corners[1:-1, None], corners[2:, None]",
        "corners[:-2, None], corners[1:-1, None], corners[1:-1, None] + 1",
        "unit/nets/test_hifigan.py",
    ),
    Mutant(
        "SEAN blends the bias of masks alone",
        "nets/sean/ace.py",
        "torch.lerp(self.mask_affine.bias, self.style_affine.bias, share)",
        "self.mask_affine.bias * (1 - share)",
        "unit/nets/sean/test_ace.py",
    ),
    # A phase and its updates.
    Mutant(
        "a phase counts from step 0",
        "gan/phase.py",
        "(step - self.start) % self.every",
        "step % self.every",
        "unit/gan/test_phase.py",
    ),
    Mutant(
        "a phase is played once too often",
        "gan/phase.py",
        "step >= self.until",
        "step > self.until",
        "unit/gan/test_phase.py",
    ),
    Mutant(
        "micro-batches are neighbours",
        "strategies/micro_batches.py",
        "slice(part, None, parts), total)(batch)",
        "slice(part * total // parts, (part + 1) * total // parts), total)(batch)",
        "unit/strategies/test_micro_batches.py",
    ),
    Mutant(
        "gradients of micro-batches are summed and not averaged",
        "strategies/turn.py",
        "_sum(losses.values(), scale / parts)",
        "_sum(losses.values(), scale)",
        "unit/strategies/test_micro_batches.py",
    ),
    Mutant(
        "an update that is not finite is made",
        "strategies/turn.py",
        "            if finite:\n                learner.update(norm)",
        "            if True:\n                learner.update(norm)",
        "ranks/test_guard.py",
    ),
    Mutant(
        "a schedule counts steps in place of updates",
        "strategies/policies/policy.py",
        "self.schedule is not None and self.player.schedule_per == what",
        'self.schedule is not None and what == "step"',
        "ranks/test_scenes.py::test_it_trains_as_one_device",
    ),
    Mutant(
        "an average moves before the update",
        "strategies/policies/policy.py",
        "        self.storage.step(self.learners_optimizer, self.reduction.stepped)\n",
        '        self._count("update")\n        self._count = lambda what: None\n'
        "        self.storage.step(self.learners_optimizer, self.reduction.stepped)\n",
        "ranks/test_scenes.py::test_it_trains_as_one_device",
    ),
    Mutant(
        "an average blends the wrong way",
        "gan/ema.py",
        "average.lerp_(buffer, 1 - decay)",
        "average.lerp_(buffer, decay)",
        "unit/gan/test_module.py",
    ),
    Mutant(
        "the decay of an average always is that of the first update",
        "gan/ema.py",
        "        self.updates += 1",
        "        pass",
        "unit/gan/test_module.py",
    ),
    Mutant(
        "ddp does not reduce",
        "strategies/policies/ddp.py",
        "        prepare_for_backward(self.reducer, loss)\n",
        "",
        "ranks/test_scenes.py::test_it_trains_as_one_device",
    ),
    Mutant(
        "a run waits for one more update that is not finite",
        "strategies/guard.py",
        "many >= PATIENCE",
        "many > PATIENCE",
        "ranks/test_guard.py",
    ),
    # Shards and pipelines.
    Mutant(
        "every rank owns the first shard",
        "strategies/sharding/bucket.py",
        "self.first = sharing.rank * self.length",
        "self.first = 0",
        "unit/strategies/test_sharding.py",
    ),
    Mutant(
        "the last stage is left out of a pipeline",
        "strategies/pipelining/schedule.py",
        "for stage in range(rank, stages, ranks)",
        "for stage in range(rank, stages - 1, ranks)",
        "unit/strategies/test_pipelining.py",
    ),
    # Data.
    Mutant(
        "all ranks get the rows of the first",
        "datasets/batches.py",
        "mine = start + self.rank * share",
        "mine = start",
        "unit/datasets/test_batches.py",
    ),
    Mutant(
        "every epoch has the same order",
        "datasets/batches.py",
        'seed_for("order", self.seed, epoch)',
        'seed_for("order", self.seed)',
        "unit/datasets/test_batches.py",
    ),
    Mutant(
        "a loader goes on one batch too early",
        "datasets/batches.py",
        "            batch += 1\n            self._position = self._position[0], batch\n            yield item",
        "            self._position = self._position[0], batch\n            yield item\n            batch += 1",
        "unit/datasets/test_resume.py",
    ),
    Mutant(
        "a batch may be any multiple of half the ranks",
        "datasets/batches.py",
        "    if batch % ranks:",
        "    if batch * 2 % ranks:",
        "unit/datasets/test_data.py",
    ),
    # What lies on disk.
    Mutant(
        "checksums are not compared",
        "gan/files/tensors.py",
        "if crc32(content) != self.checksums[8 * number : 8 * number + 8]:",
        "if False:",
        "unit/gan/files/test_damage.py",
    ),
    Mutant(
        "pieces may overlap",
        "gan/files/tensors.py",
        "if not numbers or first != end or",
        "if not numbers or",
        "unit/gan/files/test_damage.py",
    ),
    Mutant(
        "one checkpoint more is kept",
        "gan/app/training/keep.py",
        "wrote[-self.newest :]",
        "wrote[-self.newest - 1 :]",
        "unit/gan/app/training/test_keep.py",
    ),
    Mutant(
        "the worst checkpoint is kept",
        "gan/app/training/keep.py",
        "(sign * self.scores[step], -step)",
        "(-sign * self.scores[step], -step)",
        "unit/gan/app/training/test_keep.py",
    ),
    Mutant(
        "a signal is lost",
        "gan/app/training/keep.py",
        "        self.ending.wish(number)\n",
        "",
        "unit/gan/app/training/test_keep.py",
    ),
    Mutant(
        "rows of metrics beyond a checkpoint stay",
        "gan/app/training/metrics.py",
        "if number < step}",
        "if number < step + 10}",
        "unit/gan/app/training/test_metrics.py",
    ),
    Mutant(
        "a setting that has changed is not said",
        "gan/app/run/resumed.py",
        "if value != self.before.get(name)]",
        "if name not in self.before]",
        "unit/gan/app/run/test_folder.py",
    ),
    # What is shown and scored.
    Mutant(
        "a title in a page may hold HTML",
        "gan/app/page/table.py",
        '<th scope="row">{mark}{escape(row.title)}</th>',
        '<th scope="row">{mark}{row.title}</th>',
        "unit/gan/app/test_page.py",
    ),
    Mutant(
        "pictures become bytes without rounding",
        "gan/app/scoring/features.py",
        "((pictures.clamp(-1, 1) + 1) * 127.5).round().byte()",
        "((pictures.clamp(-1, 1) + 1) * 127.5).byte()",
        "unit/gan/app/scoring/test_features.py",
    ),
    Mutant(
        "a verification compares no gradient",
        "gan/app/verifying/records.py",
        "if not difference.gap <= tolerance.at(moment):",
        'if difference.moment.kind != "gradient" and not difference.gap <= tolerance.at(moment):',
        "unit/gan/app/test_verifying.py",
    ),
)
