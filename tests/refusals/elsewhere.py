"""Rows of docs/errors.md that need more than a call: which test tries them, and how each begins."""

ELSEWHERE = {
    "multi/test_time_namespaces.py": {
        "a_client_of_another_time_namespace_may_read_and_is_told_why_it_may_not_join": [
            "joined from another time"
        ]
    },
    "parity/test_b_requests.py": {
        "b10_waiting_while_paused_says_so": ["waited for blocks or copies"]
    },
    "parity/test_b_weights.py": {"b18_not_while_requests_run": ["changed the number of blocks"]},
    "unit/test_*start*.py": {
        "a_rank_that_dies_is_named_at_once": ["a rank died or left"],
        "a_timeout_names_the_missing_and_their_stages": ["ranks were not ready"],
    },
    "unit/test_cache.py": {
        "pages_as_arrays": ["gave `put` another"],
        "putting_more_than_there_is_room_for": ["put more pages"],
    },
    "unit/test_changes.py": {
        "a_cache_made_anew_has_lost_its_keys": ["scanned an index that was removed"],
        "wrong_input": ["gave `Changes` a `kept`"],
    },
    "unit/test_events.py": {
        "wrong_input": ["gave `lightcache events` an endpoint"],
        "a_cache_that_does_not_say_its_block_size": ["gave `lightcache events` no endpoint"],
    },
    "unit/test_settings.py": {
        "wrong_files": ["set an unknown key, or a value"],
    },
    "unit/test_token_records.py": {
        "without_records_tokens_are_ignored": ["created a cache with `token_ids`"],
        "wrong_tokens_reserve_nothing": ["reserved with tokens that are no ids"],
        "a_strange_object_is_refused_and_the_cache_works": [
            "the object of the token ids",
            "opened `TokenRecords`",
        ],
        "no_memory_loses_records_and_no_pages": ["there is no memory for token ids"],
    },
    "unit/test_connector.py": {"extend_refuses_what_was_not_computed": ["extended a `past`"]},
    "unit/test_connector_models.py": {
        "refused": ["gave a model that keeps states"],
        "a_mismatch_names_what_differs": ["gave a cache of another model"],
        "a_device_must_be_said": ["gave a model on a GPU"],
    },
    "unit/test_connector_parts.py": {
        "bad_caches": ["gave `offload` a static"],
        "pages_of_another_cache": ["gave pages of another cache"],
    },
    "unit/test_connector_saving.py": {
        "rows_are_refused": ["gave several rows"],
        "closed_in_order": ["used a connector after"],
    },
    "unit/test_connector_truth.py": {
        "models_whose_pages_cannot_be_shared_are_refused": ["gave a model whose keys"],
        "dropout_is_named": ["gave a model in training"],
        "another_prompt_than_the_named_one_is_published_under_no_name": ["computed other tokens"],
        "masks_that_hide_something_are_refused": ["computed with a mask"],
        "another_model_of_the_same_kind_is_not_taken_for_it": ["computed with another model"],
        "weights_that_change_behind_a_connector_publish_nothing": ["changed the weights"],
    },
    "unit/test_device_names.py": {"the_engine_of_a_cache": ["made a transfer engine for a GPU"]},
    "unit/test_transfer_engine_conformance.py": {"conformance": ["used a transfer engine after"]},
    "unit/test_transfer_engine_failures.py": {
        "bad_options": ["gave an unknown `mode`"],
        "a_captured_current_stream_is_refused": ["began a transfer while"],
    },
    "unit/test_engines_storage_service.py": {
        "the_option": ['gave "service:" with', "gave `prefill_tokens_per_s` beside"]
    },
    "unit/test_errors_tell.py": {
        "not_installed_is_an_import_error_as_well": ["called what needs a package"]
    },
    "unit/test_manager_storage.py": {
        "a_storage_that_hangs_is_closed_when_it_answers": ["closed a manager while"]
    },
    "unit/test_geometry.py": {
        "bad_input": ["gave groups, planes or states", "gave a rank outside"]
    },
    "unit/test_host_engine.py": {"sides_that_do_not_fit": ["made a transfer engine of planes"]},
    "unit/test_hybrid_features.py": {
        "what_does_not": ["gave a hybrid model conflicting settings"],
    },
    "unit/test_hybrid_refusals.py": {
        "pages_that_are_evicted_in_another_order": ["gave a cache whose pages are evicted"],
        "cropping": ["cropped the cache"],
    },
    "unit/test_layouts_input.py": {
        "bad_input": ["gave tensors of other shapes", "gave device blocks that"]
    },
    "unit/test_leases.py": {"a_replaced_cache_is_detached": ["used one that was replaced"]},
    "unit/test_lightllm.py": {
        "options": ["gave `--lightcache` what"],
        "what_does_not_go_together": ["enabled LightLLM's disk cache", "gave `name` or `storage`"],
        "another_release_is_refused": ["started another release of LightLLM"],
        "errors_are_misses": ["ended a list of pages"],
        "the_manager_dies": ["the manager of a service died"],
    },
    "unit/test_loans.py": {
        "a_worker_that_leaves_gives_everything_back": ["lent pages to a worker"],
        "a_third_process_is_refused": ["made `Loans` or `GiveBack`"],
        "arguments": ["gave `Loans` or `GiveBack`"],
    },
    "unit/test_log.py": {
        "a_second_writer_is_told_who_the_first_is": ["opened a `SharedLog` for writing"],
        "entries_outlive_their_writer": ["read a log whose writer has left"],
        "a_slow_reader_is_named": ["appended to a log of which a living"],
        "each_role_is_told_what_the_other_may": ["appended to a log as a reader"],
    },
    "unit/test_manager_*.py": {
        "more_blocks_than_the_planes_hold": ["gave a manager more device blocks"]
    },
    "unit/test_manager_disabled.py": {
        "a_request_that_was_taken_before_does_not_believe_in_its_load": [
            "a load failed, or the manager"
        ],
        "a_closed_manager_begins_nothing": ["used a manager after"],
    },
    "unit/test_moves.py": {
        "wrong_moves": [
            "gave pages or slots that are no",
            "gave pages outside",
            "gave more slots than",
        ],
        "units_of_several_tokens_begin_together": ["gave slots that do not begin"],
    },
    "unit/test_old_kernels.py": {
        "before_4_14_it_is_said_that_the_kernel_is_too_old": ["made or joined one on a kernel"]
    },
    "unit/test_opening_kv.py": {
        "refusals": ["gave `open_kv` no layer"],
        "a_refused_call_holds_nothing": ["gave `offload` or `load` of"],
    },
    "unit/test_page_index.py": {
        "check_names_what_is_broken_and_repair_mends_it": ["damaged the segment"]
    },
    "unit/test_pinned.py": {
        "what_a_refusal_says": ["the driver refused"],
        "no_memory_to_be_had": ["the driver or the pool"],
        "the_first_pages_before_the_rest": ["used a page that is not", "waited for pages longer"],
        "engines_keep_it": ["closed with views of the pinned"],
        "closed": ["used pinned pages"],
    },
    "unit/test_pinning.py": {
        "devices_that_are_none": ["pinned for a GPU"],
        "who_may_not_pin": ["pinned a cache that is"],
        "the_pool_of_a_cache": ["pinned twice"],
    },
    "unit/test_plans.py": {
        "a_disabled_cache_plans_nothing_and_lets_go": ["looked up, planned or reserved"]
    },
    "unit/test_pool_path.py": {
        "who_cannot_see_the_folder_takes_nothing": ["attached where the pool's folder"]
    },
    "unit/test_router.py": {"an_index_of_another_page_size_is_refused": ["gave a router an index"]},
    "unit/test_segment.py": {
        "open_refuses_or_replaces_what_differs": ["replaced or removed one that"]
    },
    "unit/test_families.py": {
        "a_name_has_the_model_and_a_digest": ["asked for a name of no model"],
        "a_model_without_a_name_has_the_default": [
            "opened, created or attached to a cache with neither",
            "attached to a model that has several",
            "attached to a model that has no cache",
        ],
        "the_secret_of_a_file_that_is_named": ["gave a secret twice"],
        "one_in_use_stays_and_its_memory_comes_later": [
            "created a cache for which there is no room"
        ],
    },
    "unit/test_measured_layout.py": {"what_is_refused": ["measured a layout with fewer"]},
    "unit/test_sharing.py": {"other_options_are_named": ["shared a client with other options"]},
    "unit/test_segment_clients.py": {"more_clients_than_slots": ["attached a 64th client"]},
    "unit/test_segment_limits.py": {
        "waiting_for_a_byte_ends": ["another process creates or removes"],
        "close_with_live_views": ["closed with live views"],
    },
    "unit/test_shared_objects.py": {
        "a_forked_child_is_told_to_attach": ["used it in a forked child"]
    },
    "unit/test_storage_backends.py": {"a_timeout_is_a_number": ["gave a timeout"]},
    "unit/test_storage_disk.py": {"closing_waits_for_calls": ["used a storage after `close`"]},
    "unit/test_storage_disk_opening.py": {
        "a_folder_knows_its_capacity": ["opened a new folder of a disk"],
        "a_capacity_in_use_stays": ["opened a disk with another capacity"],
        "a_header_of_another_version": ["opened a disk's folder of another"],
        "no_room": ["opened a disk without room"],
    },
    "unit/test_storage_flaky.py": {
        "registering": ["registered a scheme"],
        "entry_points": ["a package's entry point"],
        "whole_calls_fail": ["a storage could not look"],
    },
    "unit/test_storage_hangs.py": {"closing_finishes_what_is_queued": ["used a tier after"]},
    "unit/test_storage_mooncake.py": {
        "bad_urls": ["gave a storage in a Mooncake"],
        "without_the_client": ["opened a storage in a Mooncake"],
    },
    "unit/test_storage_options.py": {
        "wrong_options_are_refused_with_what_was_expected": ["gave a storage options that"]
    },
    "unit/test_storage_redis_opening.py": {
        "bad_urls": ["opened a storage of another machine"],
        "without_the_package": ["opened one without its client"],
    },
    "unit/test_storage_s3.py": {
        "a_url_that_is_wrong_is_refused_with_a_reason": ["gave a storage in S3"],
        "a_bucket_that_is_not_there": ["opened a storage in S3"],
    },
    "unit/test_storage_service.py": {
        "a_second_service_is_refused_and_names_the_first": ["started a second storage service"],
        "a_client_refuses_to_hold_pages": ["had a `StorageClient` hold"],
    },
    "unit/test_storage_service_closing.py": {
        "closing_a_client_while_tasks_run": ["used a `StorageClient` after"]
    },
    "unit/test_storage_sharing.py": {
        "only_what_was_held_can_be_published": ["published a task that is no"],
        "publishing_in_a_namespace_that_was_cleared": ["published pages of a namespace"],
    },
    "unit/test_storage_stack.py": {
        "what_it_refuses": ["made a stack of no storage"],
        "one_that_cannot_be_opened": ["opened a stack of which one"],
    },
    "unit/test_storage_tier.py": {
        "a_storage_for_other_pages": ["made a tier of a storage for"],
        "arguments_out_of_range": ["made a tier with counts"],
        "bad_calls": ["wrote a lease of more pages"],
        "a_task_waits_with_a_limit": ["waited for a task"],
    },
    "unit/test_storage_wrong_input.py": {
        "a_path_instead_of_a_url": ["opened a storage by a URL without"],
        "buffers_that_are_no_list": ["gave a storage other buffers"],
        "a_spec_that_is_none": ["opened a storage with something else"],
        "openers_that_fail": ["opened a storage of another package"],
        "no_folder": ["made a disk in no folder"],
    },
    "unit/test_transfer_engine.py": {
        "copies_refuse_what_does_not_lie_so": ['gave `mode="copies"`'],
        "windows_hold_their_layers": ["asked for a layer"],
    },
    "unit/test_page_transfers.py": {
        "an_engine_for_the_cache": ["made a transfer engine of a cache"],
        "a_failed_copy_is_not_published": ["a copy failed"],
        "new_pages_are_published_when_the_copy_is_over": ["waited for one longer"],
        "what_has_ended_or_has_shards_is_refused": [
            "offloaded a reservation of several",
            "offloaded or loaded",
        ],
        "bad_input_leaves_it_with_the_caller": ["offloaded pages of which"],
        "cleared_meanwhile": ["an offload whose"],
    },
    "unit/test_window_connector.py": {"states_alone": ["gave a model of states alone"]},
}
