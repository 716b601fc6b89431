"""Every private name of Lightning, torch and DeepSpeed that the source uses is still there, or is named here."""

import importlib
import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[3]

# The module, or module:class, and the names in it. Checked with torch 2.11 to 2.15 and Lightning 2.6.0 to 2.6.6.
NAMES = {
    "lightning.fabric.utilities.distributed": ["_set_num_threads_if_needed"],
    "lightning.pytorch.overrides.distributed": ["_sync_module_states", "prepare_for_backward"],
    "lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher": [
        *("_collect_rank_zero_results", "get_extra_results", "update_main_process_results"),
    ],
    "lightning.pytorch.strategies.launchers.multiprocessing": ["_WorkerOutput"],
    "lightning.pytorch.strategies.launchers": ["_MultiProcessingLauncher", "_SubprocessScriptLauncher"],
    "lightning.pytorch.strategies.launchers.launcher": ["_Launcher"],
    "lightning.pytorch.strategies.launchers.subprocess_script": ["_basic_subprocess_cmd"],
    "lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher": [
        "_call_children_scripts",
        "_check_can_spawn_children",
    ],
    "lightning.pytorch.trainer.call": ["_call_callback_hooks", "_call_lightning_module_hook"],
    "lightning.pytorch.strategies:DDPStrategy": ["_configure_launcher"],
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop": ["_broadcast_sigterm_tensor"],
    "lightning.pytorch.core:LightningModule": ["on_validation_model_zero_grad"],
    "torch": ["_foreach_mul_", "_foreach_norm", "_foreach_copy_"],
    "torch._C._autograd": ["_get_current_graph_task_keep_graph"],
    "torch._C._distributed_c10d:Work": ["_source_rank"],
    "torch._C": ["_current_graph_task_id", "DisableTorchFunctionSubclass", "_DisableFuncTorch"],
    "torch._dynamo.config": ["recompile_limit"],
    "torch._dynamo.exc": ["TorchDynamoException"],
    "torch._dynamo.trace_rules": ["get_torch_obj_rule_map"],
    "torch.autograd": ["_engine_run_backward"],
    "torch.testing._internal.distributed.fake_pg": ["FakeStore"],
    "torch._functorch.config": ["donated_buffer"],
    "torch.distributed": ["_broadcast_coalesced"],
    "torch.distributed.distributed_c10d": ["_get_default_store", "_set_pg_timeout"],
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent": [
        "_monitor_workers",
        "_restart_workers",
        "_start_workers",
    ],
    "torch.nn.modules.batchnorm": ["_BatchNorm"],
    "torch.utils.data._utils.signal_handling": ["_SIGCHLD_handler_set", "_set_SIGCHLD_handler"],
    "torch.utils._pytree": ["tree_flatten", "tree_unflatten", "tree_leaves", "tree_map"],
    "torch.optim:Optimizer": ["register_step_pre_hook"],
}


@pytest.mark.parametrize("place", NAMES)
def test_a_private_name_is_still_there(place):
    module, _, inner = place.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, inner) if inner else found
    lost = [name for name in NAMES[place] if not hasattr(found, name)]
    assert not lost, f"this version of {module.partition('.')[0]} has no {', '.join(lost)} in {place} any more"


def test_what_a_trainer_keeps_is_still_there():
    from lightning import Trainer

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    assert hasattr(trainer._logger_connector, "should_update_logs")
    assert hasattr(trainer._accelerator_connector, "use_distributed_sampler")
    assert hasattr(trainer._signal_connector, "_sigterm_notifier_fn")
    assert hasattr(trainer._signal_connector, "_slurm_sigusr_handler_fn")
    assert hasattr(trainer._accelerator_connector, "cluster_environment")
    assert hasattr(trainer._checkpoint_connector, "hpc_save_path")
    for name in ("_select_ckpt_path", "restore_model", "restore_callbacks", "restore_training_state"):
        assert hasattr(trainer._checkpoint_connector, name)
    assert hasattr(trainer.fit_loop.epoch_loop.manual_optimization, "optim_step_progress")


def test_modules_keep_their_parameters_and_compiled_calls_where_they_did():
    from torch import nn

    module = nn.Linear(2, 2)
    assert isinstance(module._parameters, dict) and isinstance(module._buffers, dict)
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


def test_private_imports_stand_in_the_list():
    """An import of a private name that is not in NAMES would break unnoticed."""
    listed = {name for names in NAMES.values() for name in names} | {"_pytree"}
    pattern = re.compile(r"^from (?:lightning|torch)[\w.]* import (.+)$", re.M)
    for path in [*PACKAGES.glob("strategies/**/*.py"), *PACKAGES.glob("gan/**/*.py")]:
        for imported in pattern.findall(path.read_text()):
            private = {word for word in re.findall(r"\b_[a-z]\w*", imported.split(" as ")[0])}
            assert private <= listed, f"{path.name} imports {private - listed}; add it to NAMES"
