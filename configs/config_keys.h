// THE table of configuration keys. Structs, defaults, parser, range checks, --set, `dtrain config`,
// --help and docs/config.md all come from these lists, so they can not disagree.
//
// One line a key:
//   TEXT(name, default, resume, help)                    char *, NULL when not given
//   PATH(name, default, resume, help)                    TEXT, relative to the config file's folder
//   INT(name, default, minimum, maximum, resume, help)   int64_t
//   REAL(name, default, minimum, maximum, resume, help)  double
//   FLAG(name, default, resume, help)                    bool
//   CHOICE(name, default, choices, resume, help)         int: index into "a\0b\0c"; default by name
//   TEXTS(name, resume, help)                            struct config_texts
//   PATHS(name, resume, help)                            TEXTS, each as PATH
//   INTS(name, minimum, maximum, resume, help)           struct config_ints
//   REALS(name, default, minimum, maximum, resume, help) struct config_reals; default "0.9,0.999"
// resume: KEEP = must stay the same when a run is resumed, FREE = may change.
// CONFIG_UNSET (INT) and NAN (REAL) stand for "not given"; what then happens is said in the help.
#ifndef CONFIGS_CONFIG_KEYS_H
#define CONFIGS_CONFIG_KEYS_H

// A key is one line, however long.
// clang-format off

// Sections in the order of docs and of `dtrain config`: SECTION(name, LIST, help)
#define CONFIG_SECTIONS(SECTION) \
    SECTION(run, RUN_KEYS, "what is run and where its results go") \
    SECTION(target, TARGET_KEYS, "the frozen model whose drafts are learned") \
    SECTION(data, DATA_KEYS, "feature shards") \
    SECTION(validation, VALIDATION_KEYS, "acceptance on held-out shards") \
    SECTION(drafter, DRAFTER_KEYS, "the model that is trained") \
    SECTION(anchors, ANCHORS_KEYS, "where blocks start (DFlash)") \
    SECTION(loss, LOSS_KEYS, "terms and weights; at least one term must be positive") \
    SECTION(optimizer, OPTIMIZER_KEYS, "AdamW or Muon, with fp32 master weights") \
    SECTION(schedule, SCHEDULE_KEYS, "learning rate over steps") \
    SECTION(checkpoint, CHECKPOINT_KEYS, "what is saved, and when") \
    SECTION(memory, MEMORY_KEYS, "how the step is cut to fit; frozen in execution.json") \
    SECTION(kernels, KERNELS_KEYS, "which kernels are used; frozen in execution.json") \
    SECTION(parallel, PARALLEL_KEYS, "ranks and threads") \
    SECTION(log, LOG_KEYS, "what is reported")

#define RUN_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    PATH(dir, NULL, FREE, "run folder: checkpoints, metrics, log; created when missing (required)") \
    INT(seed, 42, 0, INT64_MAX, KEEP, "keys every random draw") \
    INT(epochs, 1, 1, 1000000, FREE, "passes over the training documents") \
    INT(max_steps, 0, 0, INT64_MAX, FREE, "optimizer steps; 0: what the epochs give; ends early inside the epochs") \
    CHOICE(device, auto, "auto\0cuda\0cpu", KEEP, "auto takes a GPU when there is one") \
    CHOICE(compute, bf16, "bf16\0fp32", KEEP, "dtype of weights and activations in the step; master weights and optimizer state are fp32 always") \
    INT(max_nonfinite, 10, 0, 1000000, FREE, "steps in a row that may be skipped for a non-finite gradient before the run stops; 0: stop at the first")

#define TARGET_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    PATH(path, NULL, FREE, "target directory (config.json, head.safetensors) or full Hugging Face model directory (required)") \
    INTS(layer_ids, 0, 100000, KEEP, "decoder layers whose outputs feed the drafter, 0-based, ascending; a subset of the shards' planes; empty: all planes of the shards") \
    TEXT(name, NULL, FREE, "name written in exports as the target; default: the shards' target_model")

#define DATA_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    PATHS(train, KEEP, "feature shards to train on: paths and globs, expanded and sorted (required to train without a manifest)") \
    PATHS(val, KEEP, "feature shards to validate on: paths and globs") \
    PATH(manifest, NULL, KEEP, "document manifest of a spooled data set, instead of train; needs spool") \
    PATH(spool, NULL, FREE, "folder through which an extractor feeds the features of the manifest's documents while training runs; shards are removed when they have been used") \
    TEXT(spool_bytes, "64GiB", FREE, "what shards in the spool may take together, as 64GiB; the extractor waits when it is full") \
    INT(spool_wait, 1800, 0, 31536000, FREE, "seconds without a new shard of the spool after which a waiting run saves and stops with status 75; 0: it waits for ever") \
    INT(seq_len, 4096, 2, 16777216, KEEP, "tokens in a packed row; longer documents are cut") \
    INT(rows_per_step, 1, 1, 1048576, KEEP, "packed rows in one optimizer step, over all ranks and micro-steps") \
    CHOICE(on_bad_sample, fail, "fail\0skip", FREE, "a document with bad values: stop, or give it weight 0 and count it") \
    REAL(max_bad_fraction, 0.01, 0.0, 1.0, FREE, "share of documents that `skip` may leave out before the run stops") \
    REAL(noise_std, 0.0, 0.0, 100.0, KEEP, "noise added to the context features in training: deviation (normal) or half width (uniform)") \
    CHOICE(noise_kind, normal, "normal\0uniform", KEEP, "distribution of the noise") \
    INT(prefetch_rows, 2, 1, 64, FREE, "packed rows read ahead of the step") \
    INT(readers, 2, 1, 64, FREE, "threads that read shards") \
    FLAG(check_crc, true, FREE, "verify doc_crc32c where a shard has it, when a document is read")

#define VALIDATION_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    INT(every, 0, 0, INT64_MAX, FREE, "steps between validations; 0: only after the last step; needs data.val") \
    FLAG(at_start, true, FREE, "validate once before the first step, so that a rise can be seen") \
    INT(rows, 32, 1, 1048576, FREE, "packed rows of the validation shards, always the same ones") \
    INTS(draft_tokens, 1, 63, FREE, "also report accept_len_walk for these numbers of drafts") \
    INT(patience, 0, 0, 1000000, FREE, "validations without a better accept_len_walk before the run ends early; 0: never")

#define DRAFTER_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    CHOICE(kind, dflash, "dflash\0eagle3", KEEP, "drafter architecture") \
    CHOICE(style, qwen3, "qwen3\0llama", KEEP, "eagle3: qwen3 has norms on queries and keys, llama has none; dflash is qwen3") \
    INT(layers, 5, 1, 256, KEEP, "decoder layers of the drafter") \
    INT(block_size, 16, 2, 64, KEEP, "slots in a block, slot 0 (the anchor) included") \
    INT(mask_token_id, CONFIG_UNSET, 0, 2147483647, KEEP, "token whose embedding fills slots 1.. (required for dflash)") \
    FLAG(allow_special_mask, false, FREE, "accept a mask token that is the target's eos, bos or pad token") \
    FLAG(predict_from_anchor, false, KEEP, "slot k predicts token anchor+1+k (DSpark's layout) instead of anchor+k") \
    INT(num_attention_heads, CONFIG_UNSET, 1, 1024, KEEP, "query heads; default: the target's") \
    INT(num_key_value_heads, CONFIG_UNSET, 1, 1024, KEEP, "key and value heads; default: the target's") \
    INT(head_dim, CONFIG_UNSET, 2, 512, KEEP, "width of a head; default: the target's") \
    INT(intermediate_size, CONFIG_UNSET, 1, 1048576, KEEP, "width of the MLP; default: the target's") \
    REAL(rms_norm_eps, NAN, 1e-12, 1.0, KEEP, "epsilon of the drafter's norms; default: the target's") \
    REAL(rope_theta, NAN, 1.0, 1e12, KEEP, "base of the rotary embedding, over the full head; default: the target's") \
    CHOICE(rope_scaling, none, "none\0linear\0yarn", KEEP, "scaling of the rotary embedding, written to the export") \
    REAL(rope_factor, 1.0, 1.0, 1024.0, KEEP, "factor of rope_scaling") \
    INT(rope_original_positions, CONFIG_UNSET, 1, INT64_MAX, KEEP, "yarn: positions before scaling; default: the target's max_position_embeddings") \
    INT(max_position_embeddings, CONFIG_UNSET, 1, INT64_MAX, KEEP, "written to the export; default: the target's") \
    TEXTS(layer_types, KEEP, "per layer: full_attention or sliding_attention; default: all full") \
    INT(sliding_window, CONFIG_UNSET, 1, INT64_MAX, KEEP, "tokens a sliding layer sees back, measured from the query (required with sliding layers); eagle3: at least ttt_steps") \
    FLAG(sliding_window_non_causal, false, KEEP, "sliding layers see the whole own block; servers do not run this") \
    CHOICE(window_origin, query, "query\0anchor", KEEP, "where the window is measured from; anchor reproduces speculators") \
    REAL(init_std, 0.02, 0.0, 1.0, KEEP, "standard deviation of initial weights; norms start at 1") \
    PATH(init_from, NULL, FREE, "directory of a released drafter (z-lab, SpecForge or speculators layout) whose weights a fresh run starts from; it must be what this section says") \
    TEXTS(init_allow, FREE, "fields and tensors of init_from that may differ, be missing or extra, by the names that the refusal gives; such tensors start as init_std says") \
    INT(markov_rank, 0, 0, 4096, KEEP, "rank of a trained Markov head (DSpark's): logits depend on the token in front, too, by two tables of this width, on a GPU best a multiple of 8; 0: none") \
    INT(ttt_steps, 7, 1, 16, KEEP, "eagle3: unrolled steps") \
    PATH(draft_vocab, NULL, KEEP, "eagle3: vocabulary map; default: the full vocabulary") \
    CHOICE(lm_head, frozen, "frozen\0trainable", KEEP, "eagle3: the head over the draft vocabulary") \
    FLAG(norm_before_residual, false, KEEP, "eagle3: the residual is the normed feature") \
    FLAG(norm_before_fc, false, KEEP, "eagle3: one norm over all features before fc; not together with fc_norm") \
    FLAG(fc_norm, false, KEEP, "eagle3: one norm for each feature before fc") \
    FLAG(norm_output, false, KEEP, "eagle3: the final norm's output is fed back, as servers do")

#define ANCHORS_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    INT(max_anchors, 512, 1, 16777216, KEEP, "anchors drawn per row or document; memory does not depend on it") \
    CHOICE(per, row, "row\0document", KEEP, "what max_anchors counts for") \
    CHOICE(tail, mask, "mask\0whole", KEEP, "mask: a block may run past its document's end, its slots there weigh 0; whole: it may not")

#define LOSS_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    REAL(kl, 0.0, 0.0, 1e6, KEEP, "weight of KL(teacher || student)") \
    REAL(reverse_kl, 0.0, 0.0, 1e6, KEEP, "weight of KL(student || teacher)") \
    REAL(js, 0.0, 0.0, 1e6, KEEP, "weight of the Jensen-Shannon divergence") \
    REAL(ce_teacher, 0.0, 0.0, 1e6, KEEP, "weight of cross entropy against the teacher's argmax") \
    REAL(ce_data, 0.0, 0.0, 1e6, KEEP, "weight of cross entropy against the data token; alone, it needs no last hidden state") \
    REAL(tv, 0.0, 0.0, 1e6, KEEP, "weight of total variation, 1 - sum min(p, q)") \
    REAL(nla, 0.0, 0.0, 1e6, KEEP, "weight of -log(1 - tv)") \
    REAL(lk, 0.0, 0.0, 1e6, KEEP, "weight of the hybrid lambda kl + (1 - lambda) tv, lambda = exp(-lk_eta (1 - tv))") \
    REAL(lk_eta, 3.0, 0.0, 1000.0, KEEP, "eta of lk") \
    CHOICE(slot_weight, exp, "exp\0dpace\0uniform", KEEP, "weight of a slot: exp(-(k-1)/gamma), D-PACE, or 1") \
    REAL(slot_decay_gamma, 7.0, 1e-3, 1e6, KEEP, "gamma of slot_weight exp") \
    REAL(dpace_alpha, 0.5, 0.0, 1.0, KEEP, "smoothing of D-PACE's confidences") \
    CHOICE(slot_mask, prefix, "prefix\0each", KEEP, "prefix: slots after the first unsupervised one weigh 0; each: only unsupervised ones do") \
    CHOICE(normalize, weighted, "weighted\0count", KEEP, "divide by the sum of weights, or by the number of slots of nonzero weight") \
    REAL(ttt_decay_base, 1.0, 0.0, 1.0, KEEP, "eagle3: weight of ttt_step i is this to the power i") \
    CHOICE(mask_index, served, "served\0label\0input\0feature", KEEP, "eagle3: which positions count at a ttt_step") \
    CHOICE(out_of_vocab, masked, "masked\0kept", KEEP, "eagle3: positions whose teacher argmax is outside the draft vocabulary") \
    FLAG(full_vocab_metrics, true, KEEP, "eagle3 with a draft vocabulary: training steps, too, measure acceptance against the teacher over the whole vocabulary (validation always does)")

#define OPTIMIZER_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    CHOICE(kind, adamw, "adamw\0muon", KEEP, "muon: orthogonalised momentum for hidden matrices, AdamW for norms and vocabulary tables") \
    REAL(lr, 6e-4, 0.0, 10.0, KEEP, "peak learning rate") \
    REALS(betas, "0.9,0.999", 0.0, 0.999999, KEEP, "decay of the two moments") \
    REAL(eps, 1e-8, 0.0, 1.0, KEEP, "added to the root of the second moment") \
    REAL(weight_decay, 0.0, 0.0, 10.0, KEEP, "decoupled decay of matrices; norms never decay") \
    REAL(grad_clip, 1.0, 0.0, 1e9, KEEP, "largest global gradient norm; 0: no clipping") \
    REAL(ema, 0.0, 0.0, 0.999999, KEEP, "decay of a moving average of the weights, which validation, eval and exports then use, as 0.999; 0: none") \
    REAL(muon_lr, NAN, 0.0, 10.0, KEEP, "muon: peak learning rate of the matrices that Muon takes; default: lr") \
    REAL(muon_momentum, 0.95, 0.0, 0.999999, KEEP, "muon: decay of the momentum, which looks ahead (Nesterov)") \
    INT(muon_ns_steps, 5, 1, 20, KEEP, "muon: Newton-Schulz iterations") \
    CHOICE(muon_scale, adamw_rms, "adamw_rms\0original", KEEP, "muon: factor of the orthogonal matrix: 0.2 sqrt(max(rows, columns)), as large as AdamW's updates; or sqrt(max(1, rows / columns))") \
    REAL(muon_weight_decay, NAN, 0.0, 10.0, KEEP, "muon: decoupled decay of the matrices that Muon takes; default: weight_decay")

#define SCHEDULE_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    CHOICE(kind, cosine, "cosine\0linear\0wsd\0constant", KEEP, "shape after warm-up; wsd is constant, then falls over decay_ratio") \
    REAL(warmup_ratio, 0.0, 0.0, 1.0, KEEP, "share of all steps that warm up linearly from 0") \
    INT(warmup_steps, CONFIG_UNSET, 0, INT64_MAX, KEEP, "warm-up in steps; instead of warmup_ratio") \
    REAL(min_lr_ratio, 0.0, 0.0, 1.0, KEEP, "learning rate at the last step, as a share of the peak") \
    REAL(decay_ratio, 0.1, 0.0, 1.0, KEEP, "wsd: share of all steps in the final fall")

#define CHECKPOINT_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    INT(every, 500, 0, INT64_MAX, FREE, "steps between checkpoints; 0: only at the end and on signals") \
    INT(keep, 3, 1, 1000000, FREE, "newest checkpoints that are kept, besides the best") \
    FLAG(best, true, FREE, "keep the checkpoint of the best accept_len_walk as checkpoints/best") \
    FLAG(background, true, FREE, "write from a host copy while training goes on")

#define MEMORY_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    INT(group_rows, 0, 0, 1073741824, KEEP, "block rows that go through the drafter together, rounded down to whole blocks, one at least; 0: chosen") \
    INT(chunk_rows, 0, 0, 1073741824, KEEP, "student and distinct teacher rows whose logits exist together, 2 at least (1 is taken for 2); 0: chosen") \
    CHOICE(mode, normal, "normal\0low", KEEP, "low: least memory, for a longer step; it decides recompute and, on a GPU, chunk_rows where they are left open") \
    CHOICE(recompute, auto, "auto\0none\0cheap\0layer", KEEP, "what the backward pass computes again: nothing, norms and activations, whole layers; auto: none on a CPU and for one layer of EAGLE-3, else cheap on a GPU, layer with mode low") \
    CHOICE(logits, fp32, "fp32\0bf16", KEEP, "dtype of the logits of a chunk; bf16 halves them and costs accuracy") \
    TEXT(limit, NULL, FREE, "memory that a run may take, as 80GiB or 512MiB: of a GPU in all, CUDA context included; on a CPU for what is planned, step and host part, while the program, its libraries and the mapped target files come on top; default: what is free when it starts")

#define KERNELS_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    CHOICE(path, auto, "auto\0generic", KEEP, "auto: the fastest kernels that the GPU has; generic: those that every supported GPU has") \
    TEXT(algorithms, NULL, FREE, "folder, by its absolute path, of the GEMM algorithms that runs on a GPU chose by timing and later runs take; none: each run times its own, results are the same; default: .cache/dtrain in the home folder")

#define PARALLEL_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    INT(gpus, 0, 0, 4096, FREE, "ranks that dtrain starts on this machine when no launcher has started it, one for each GPU; 0: as many as there are GPUs, but not more than data.rows_per_step") \
    INT(port, 0, 0, 65535, FREE, "TCP port on which rank 0 expects the other ranks; 0: chosen, see docs/ranks.md") \
    INT(timeout, 300, 1, 86400, FREE, "seconds after which a rank that is not heard of, or that the others wait for, ends the run; more than the longest that one rank alone may be busy") \
    INT(threads, 0, 0, 4096, FREE, "CPU threads of the step; 0: one per core")

#define LOG_KEYS(TEXT, PATH, INT, REAL, FLAG, CHOICE, TEXTS, PATHS, INTS, REALS) \
    INT(every, 10, 1, INT64_MAX, FREE, "steps between plain progress lines; metrics.jsonl has every step") \
    CHOICE(level, info, "error\0warn\0info\0debug", FREE, "least important messages shown") \
    FLAG(tensorboard, true, FREE, "write events/ for TensorBoard") \
    REAL(peak_tflops, 0.0, 0.0, 1e6, FREE, "10^12 operations a second that one device can do in the type the step computes in, for the model FLOPs utilisation; 0: known by the GPU's name, and not reported for other GPUs and CPUs")
// clang-format on

#endif
