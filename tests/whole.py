"""What `make test-all` has beyond `make test`, and why: the tests that are marked `whole`.

`make test` leaves those out, with `-m "not whole"`; pytest by itself runs everything that it is given. `python -m benchmark.tables --write
tests/README.md` writes the table of these.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kept_cases import each_value, first, matching, none, one_of


class Group(NamedTuple):
    """Tests that `make test` has some cases of. stays: which, in words, and keep: the same of the cases of one function; tests: by file
    below tests/cpu, the functions, each without its "test_"."""

    what: str
    stays: str
    keep: Callable[[list[pytest.Item]], set[int]]
    reason: str
    tests: dict[str, str]


GROUPS = (
    Group(
        "whole models under `torch.compile`",
        "the first case of each test",
        first,
        "a model compiles for 5 to 30 seconds; each operation is compiled in `make test`, forward and backward",
        {
            "test_compile.py": "a_compiled_model_runs_the_kernels_that_it_runs_otherwise what_people_train_is_fused_when_compiled "
            "a_replaced_forward_runs_when_compiled export attention_has_a_mask_when_compiled_where_one_was_given",
            "test_eight_bits.py": "a_compiled_model_has_them",
            "test_expert_adapters.py": "torch_compile",
            "attention/test_attention_batches.py": "compile",
            "test_layers.py": "torch_compile",
            "test_qwen3_5.py": "torch_compile",
            "test_qwen3_5_documents.py": "torch_compile_refuses",
            "test_moe_models.py": "torch_compile",
            "families/test_families.py": "torch_compile",
            "families/test_logits_flow.py": "torch_compile",
            "attention/test_users_masks.py": "the_users_masks_are_obeyed_in_a_graph",
        },
    ),
    Group(
        "masks, towers and Inductor under `torch.compile`, models that change afterwards, and what a graph has of one option",
        "none",
        none,
        "each compiles a model, some of them several times; each form of a model is compiled once in `make test`. Run these files when you "
        "change what a graph sees of a layer",
        {
            "test_compile.py": "adapters_that_are_switched_compile_again dropout_of_an_adapter_is_drawn_when_compiled "
            "nothing_that_the_first_step_learns_makes_the_second_one_compile a_compiled_mlp_is_made_again "
            "a_compiled_model_evaluates_in_training_mode_without_gradients a_compiled_mlp_is_computed_in_tiles "
            "a_model_compiles_with_inductor a_model_compiles_a_second_time_when_lengths_vary_and_then_no_more "
            "the_gradient_of_the_embedding_is_eager_modes_bit_for_bit",
            "test_compiled_numbers.py": "a_model_with_symbols_for_its_numbers",
            "test_states_of_four_bits.py": "a_compiled_model_calls_the_experts",
            "test_host_embeddings.py": "ddp_and_a_graph",
            "families/test_layers_beside_a_row.py": "layers_in_a_graph",
            "test_qwen3_5_vision.py": "torch_compile",
            "test_qwen3_5_documents.py": "torch_compile",
            "families/test_families.py": "attention_of_a_decoder_with_one_mask_has_none_when_compiled "
            "entries_of_a_configuration_that_its_decoder_does_not_read_change_nothing",
            "families/test_vision_towers.py": "torch_compile_behind_a_vision_tower",
            "test_eight_bit_weights.py": "in_a_graph",
            "test_lookups.py": "a_graph_calls_it",
            "attention/test_attention_choice.py": "a_model_that_was_given_it_compiles",
            "attention/test_attention_documents.py": "rows_without_position_ids_go_to_sdpa_in_a_graph",
            "attention/test_bounds_of_documents.py": "in_a_graph_no_bounds_are_read",
            "test_sequence_parallel.py": "ulysses_compiled",
            "test_users_parts.py": "a_forward_that_is_put_on_a_module_after_compiling",
        },
    ),
    Group(
        "attention in both directions, in a graph",
        "without a graph",
        matching("^eager"),
        "each compiles a model",
        {"families/test_families.py": "attention_in_both_directions"},
    ),
    Group(
        "the self checks of every package",
        "Qwen3's package, and the first of the modes that a user may have set",
        first,
        "two to four seconds each; the operations are the same in all packages, and test_packages.py says which kernels each ships",
        {
            "test_self_check.py": "every_package_checks_its_operations_against_float64 "
            "every_package_checks_the_operations_whose_kernels_it_ships the_check_sets_its_own_modes",
        },
    ),
    Group(
        "the last of two calls of `apply` and `kernelize`",
        "Qwen3-MoE",
        first,
        "every call follows every other one in both packages, some 300 times, with the same functions",
        {"test_option_pairs.py": "the_last_call_wins"},
    ),
    Group(
        "losses of every type that transformers lists",
        "each way in which a forward makes its logits",
        none,
        "each of some 270 models is built, without memory, for a second; run it when you change what reads forwards",
        {"families/test_losses_of_all_types.py": "most_types_are_served"},
    ),
    Group(
        "files of models with a change at one place",
        "those of the first file",
        first,
        "sixteen models of each file train before and after; run test_changed_files.py when you change what reads forwards",
        {
            "test_changed_files.py": "a_changed_file_is_served_as_what_it_is_or_not_at_all "
            "a_changed_router_or_block_is_served_as_what_it_is_or_not_at_all",
        },
    ),
    Group(
        "whole models whose kernels the interpreter runs",
        "the first case of each test",
        first,
        "a step takes 20 seconds; the kernels and the nodes of each layer are compared with float64 in `make test`",
        {"test_qwen3_5.py": "the_kernels_in_a_model", "test_qwen3_moe_patching.py": "a_step_runs_the_kernels_that_the_warm_up_loads"},
    ),
    Group(
        "the self check's operations under `torch.compile`, and operators without their kernels",
        "none",
        none,
        "what is compiled is what the tests of each operation and of each operator with its kernels compile, at other sizes",
        {"test_compile.py": "every_self_check_compiles_whole operators"},
    ),
    Group(
        "operators and losses under `torch.compile`, by dtype",
        "each operator once, each option of the loss once, each dtype",
        each_value,
        "a graph of one operation takes a second, and does not depend on the dtype but in its kernels, which the interpreter's tests run",
        {"test_compile.py": "operators_with_kernels the_loss_compiles_whole"},
    ),
    Group(
        "operations in fp16",
        "bf16 and fp32",
        matching(r"^(?!.*torch\.float16)"),
        "the kernels are those of bf16 but for the dtype",
        {
            "test_operations.py": "operation",
            "test_kernels.py": "rms_norm rms_norm_with_an_fp32_weight add_rms_norm rotary qk_norm_rotary swiglu "
            "linear_cross_entropy_options linear_cross_entropy_sizes",
        },
    ),
    Group(
        "autograd's ways of calling an operation, and odd addresses",
        "kernels in bf16 and PyTorch in fp32",
        matching(r"^kernels-.*bfloat16|^pytorch-.*float32"),
        "when a backward pass runs, and where a tensor begins, do not depend on the dtype",
        {"test_autograd.py": "autograd", "test_alignment.py": "odd_addresses odd_addresses_in_the_suite"},
    ),
    Group(
        "the checks of every operation, with results of a replay",
        "one check of each file of tests/ops",
        one_of(r"^\w+"),
        "a replay is the same for all checks of an operation; a layer's nodes are all replayed in `make test`",
        {"test_replay.py": "every_check_holds_for_results_of_a_replay"},
    ),
    Group(
        "training in several processes",
        "the first case of each test; DDP, FSDP1 and FSDP2 each with a whole training",
        one_of(r"^(DDP|FSDP1|FSDP2)|^(?!DDP|FSDP[12])"),
        "two processes that train take seconds, and the cases are products of what is sharded, ways of patching and options",
        {
            "test_parallel.py": "ddp ddp_accumulation ddp_with_lora fsdp fsdp1_of_families fsdp_accumulation fsdp_checkpoint_wrapper "
            "fsdp_checkpointing fsdp_mixed_precision fsdp_of_families fsdp_of_moe fsdp_options fsdp_plan_of_transformers fsdp_with_lora "
            "kinds_of_parallel_training packed_rows plans_of_moe tensor_parallelism trainer_in_two_processes units_of_fsdp1",
        },
    ),
    Group(
        "TRL's trainers in two processes, DeepSpeed, expert and sequence parallelism in any order",
        "the first case of each test",
        first,
        "the same",
        {
            "test_parallel.py": "trainers_of_trl_in_two_processes trl_in_parallel fsdp1_of_other_layers",
            "test_expert_parallel.py": "expert_parallel_in_any_order save_under_expert_parallelism",
            "test_sequence_parallel.py": "ulysses_in_any_order ulysses_over_four ulysses_by_accelerate ulysses_by_a_trainer",
            "test_zero.py": "a_model_made_sharded checkpointing_under_zero gradients_under_zero lora_under_zero "
            "options_of_the_loss_under_zero other_ways_under_zero tied_embeddings_under_zero trainer_under_zero training_under_zero",
        },
    ),
    Group(
        "TRL's trainers with all their options",
        "each trainer once",
        one_of(r"^\w+"),
        "what an option makes of the loss is compared with TRL's own function in test_trl.py",
        {"test_integrations.py": "trainers_of_trl"},
    ),
    Group(
        "families, ways of patching, adapters, dtypes and places, as products",
        "each value of each of them once",
        each_value,
        "a value fails with whatever it is combined, or the pair is a test of its own",
        {
            "test_integrations.py": "accumulation_equals_one_large_batch autocast_and_adapters_are_fused_and_as_exact "
            "checkpoint_around_one_layer gradient_checkpointing_of_a_model greedy_tokens hooks_hear_what_they_would_hear "
            "a_model_loaded_in_four_bits lora_on_moe lora_on_projections lora_on_the_head offloaded_parts options_of_lora_are_fused "
            "replaced_linears trainer_of_moe trainers_of_families generation_of_families",
            "test_parallel.py": "eight_bits_in_parallel what_is_said_of_sharded_models",
            "test_expert_parallel.py": "expert_parallel",
            "test_sequence_parallel.py": "ulysses_with_checkpoints",
            "test_two_passes.py": "gradients_are_those_of_the_plain_model",
            "test_moe_models.py": "arguments lora gradient_checkpointing",
            "test_decoders.py": "heads_that_the_hub_turns_keep_their_dtype",
            "test_optimizer_steps.py": "what_happens_between_steps_is_noticed",
            "test_autocast.py": "forward_and_backward_on_either_side_of_autocast",
            "test_alignment.py": "odd_addresses_in_groups_that_are_cut",
            "families/test_families.py": "gradient_checkpointing adapters_of_experts_and_routers made_again_in_the_backward_pass",
            "test_recomputation.py": "each_layer_runs_twice",
            "attention/test_attention_of_others.py": "what_is_a_users_own_gets_masks_of_transformers "
            "libraries_that_hand_on_what_they_are_called_with_leave_a_model_its_attention",
            "attention/test_attention_choice.py": "an_implementation_that_was_asked_for_by_name_is_kept",
            "attention/test_attention_documents.py": "documents_of_position_ids_are_found_without_transformers",
            "attention/test_users_masks.py": "the_users_masks_are_obeyed",
            "attention/test_replaced_defaults.py": "a_function_in_the_place_of_the_default_is_obeyed",
            "attention/test_padding_users_modules.py": "a_users_module_sees_the_whole_batch",
            "attention/test_padding_adapters.py": "every_tuner_trains_as_without_us",
            "attention/test_padding_left_out.py": "whoever_reads_padding_reads_what_transformers_computes",
            "families/test_layers_of_all_types.py": "experts_in_every_way_of_training",
            "families/test_layers_beside_a_row.py": "layers_are_read generation",
            "families/test_vision_towers.py": "a_training_step_behind_a_vision_tower lora_behind_a_vision_tower",
            "capture/test_capture.py": "the_second_pass_is_recorded_and_gradients_have_the_same_bits gradients_accumulate "
            "other_shapes_run_as_before padding_that_attention_has_no_plan_for the_number_of_items_is_the_losses_alone reset_takes_it_off",
            "capture/test_capture_between.py": "what_stands_between_layers_when_they_are_looked_at what_comes_between_captured_layers "
            "layers_with_arguments_of_their_own_share_no_graph",
            "capture/test_capture_changes.py": "what_changes_is_recorded_anew a_function_that_is_replaced_is_recorded_anew "
            "a_container_that_is_changed_in_place",
            "capture/test_capture_inputs.py": "documents_that_are_written_between_passes positions_that_are_written_between_passes",
        },
    ),
    Group(
        "families whose kernels the interpreter runs",
        "each family in PyTorch; with kernels Llama, Hunyuan, Nemotron and Qwen2-MoE",
        matching(r"^(?!.*-kernels)|^(llama|hunyuan_v1_dense|nemotron|qwen2_moe)-kernels"),
        "one to four seconds each; the nodes' kernels are compared with float64 where they, the nodes or the interpreter change, and those "
        "four have the kinds of them that there are",
        {"families/test_families.py": "a_training_step lora documents_and_padding weights_side_by_side generation"},
    ),
    Group(
        "a trainer for each of the families",
        "Gemma 2, Nemotron, Mixtral and FlexOlmo",
        matching(r"^(gemma2|nemotron|mixtral|flex_olmo)$"),
        "two trainings, saved and loaded; each family trains a step in `make test`, and Llama, Gemma 3 and Phi-3 have every trainer",
        {"test_integrations.py": "the_trainer_of_the_other_families"},
    ),
    Group(
        "configurations, half precision and autocast of the families",
        "one configuration of each family; half precision of Llama, Gemma 3 and Phi-3; autocast of two, and with the kernels of a third",
        one_of(r"^(llama|gemma3_text|phi3)\b|^\w+(?=-(?!kernels))|^qwen2(?=-)"),
        "each family trains a step in `make test`, and its layers are compared with transformers' own (test_rows.py)",
        {
            "families/test_families.py": "what_a_configuration_may_change half_precision_is_as_exact_as_before "
            "half_precision_of_a_layer_that_is_not_fused autocast",
        },
    ),
    Group(
        "what packages leave on objects that are not theirs",
        "Qwen3's package",
        first,
        "five to ten seconds each, and all packages put their layers there by the same functions",
        {"test_footprint.py": "reset_takes_everything_off"},
    ),
    Group(
        "changed texts of transformers",
        "one text of each module",
        one_of(r"^\w+-[\w.]+"),
        "what a text does when it changes follows from one table",
        {"test_texts.py": "a_changed_text_leaves_what_relies_on_it_to_transformers_and_nothing_else"},
    ),
    Group(
        "blocks of the documents",
        "README's, and the first of the card and of the guide to LoRA",
        matching(r"^README|^(CARD|docs/lora)\.md-1$"),
        "each is a process that loads from a Hub and trains; run test_readme.py when you change a document",
        {"test_readme.py": "a_block_runs"},
    ),
    Group(
        "each package's build and card, ways of fetching, uploading and importing, releases of transformers that are made up",
        "the first case of each test",
        first,
        "each takes seconds; every package is assembled, and loaded, by the tests of its models",
        {
            "test_packages.py": "a_build_is_whole the_card_describes_every_layer_and_gpu",
            "publishing/test_kernels_command.py": "what_is_locked_and_downloaded_loads_without_a_network",
            "publishing/test_publish.py": "a_killed_upload_is_finished_by_running_it_again",
            "test_texts.py": "a_made_up_release",
            "test_liger_dispatcher.py": "chosen_by_the_environment",
            "test_trl.py": "imports_that_come_later",
        },
    ),
    Group(
        "whole builds, assemblies and publications",
        "none",
        none,
        "each compiles or assembles a package again, for seconds; run these files when you change tools",
        {
            "builds/test_assemble.py": "a_variant_of_more_than_20_mib_is_refused damaged_kernels_are_not_assembled "
            "kernels_older_than_their_source_are_not_assembled what_a_former_assembly_left_is_removed another_source_is_another_build "
            "the_commit_and_whether_it_was_clean_are_recorded",
            "builds/test_build.py": "a_killed_build_leaves_whole_cubins_and_the_next_one_makes_the_rest "
            "another_part_of_the_compiler_compiles_everything_again",
            "builds/test_prebuilt_kernels.py": "a_package_that_has_become_too_large_is_not_recorded",
            "test_faults.py": "a_killed_assembly_leaves_the_old_build_the_new_one_or_none",
            "test_packages.py": "all_are_published_at_once_and_their_cards_run a_second_wheel_holds_nothing_of_the_first_that_is_gone "
            "a_staged_package_is_a_tree_that_kernel_builder_takes",
            "test_readme.py": "a_cluster_without_a_network_has_what_was_fetched_as_a_whole",
        },
    ),
    Group(
        "what a process prints as it ends, what the GPU tests import, pytest without a network, and Liger alone",
        "none",
        none,
        "each is a process that imports everything, and changes when imports do: run these files when you change those",
        {
            "publishing/test_hub.py": "what_a_machine_says_of_its_network_does_not_reach_the_tests",
            "test_faults.py": "at_the_end_of_the_interpreter_nothing_is_printed",
            "test_sanitizer.py": "the_tests_for_a_gpu_need_no_compiler",
            "test_liger_back_end.py": "where_liger_is_wrong",
            "test_liger_dispatcher.py": "the_environment_alone_is_refused_by_liger",
        },
    ),
    Group(
        "benchmarks as processes, and what the host needs",
        "none",
        none,
        "four to thirteen seconds each; each benchmark runs with small sizes in `make test`. Run these files when you change benchmark/",
        {
            "test_benchmark_declarations.py": "a_new_operation_is_one_file",
            "test_benchmark_kernels_cli.py": "kernels_benchmark_runs_every_file_of_a_snapshot",
            "test_benchmark_runs.py": "the_hosts_time the_step_of_the_optimizer",
            "test_benchmark_models.py": "a_deep_model_uses_all_experts",
            "test_benchmark_processes.py": "nothing_that_is_imported_before_the_fork_starts_cuda_or_chooses_for_all",
            "publishing/test_kernels_command.py": "kernels_benchmark_runs_what_is_published",
        },
    ),
    Group(
        "runs of transformers' own tests, of a stand-in",
        "none",
        none,
        "each is several processes of pytest; run test_upstream.py when you change tests/upstream",
        {
            "test_upstream.py": "the_same_results a_suite_that_nothing_of_ours_ran_in_says_nothing "
            "what_cannot_be_collected_is_named_and_the_others_run a_test_that_differs_is_named tests_that_nobody_ran_are_no_success",
        },
    ),
)  # fmt: skip


@functools.cache
def groups() -> dict[str, Group]:
    """The group of each function, by what pytest calls it without its parameters. Raises ValueError for one that is in two."""
    found: dict[str, Group] = {}
    for group in GROUPS:
        for file, functions in group.tests.items():
            for function in functions.split():
                name = f"tests/cpu/{file}::test_{function}"
                if name in found:
                    raise ValueError(f"{name} is in two groups")
                found[name] = group
    return found


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the tests that are for `make test-all` alone."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        if name not in groups():
            continue
        run = [case for case in cases if hasattr(case, "callspec") and not any(case.iter_markers("skip"))]
        stay = {id(run[i]) for i in groups()[name].keep(run)} if run else set()
        for case in cases:
            if id(case) not in stay:
                case.add_marker(pytest.mark.whole)


# ---------------------------------------------------------------- the table of tests/README.md
def table() -> str:
    rows = ["| tests | of these, `make test` has | why not all | in |", "|---|---|---|---|"]
    for group in GROUPS:
        files = ", ".join(f"[{Path(file).stem.removeprefix('test_')}](cpu/{file})" for file in group.tests)
        rows.append(f"| {group.what} | {group.stays} | {group.reason} | {files} |")
    return "\n".join(rows)
