"""The same as benchmarks.causes, of scripts that are written with libraries, as their users write them.

    pip install ".[frameworks]" albumentations datasets diffusers fastai gymnasium kornia monai nibabel \
        open_clip_torch opencv-python-headless peft pytorch-forecasting pytorch-metric-learning scikit-learn \
        segmentation-models-pytorch sentence-transformers skorch stable-baselines3 tensorboard timm torch_geometric \
        torchmetrics torchvision x-transformers zarr
    python -m benchmarks.libraries                  all of them, some 80 s each
    python -m benchmarks.libraries --only birds_timm

The remedy of each is a patch beside it. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.causes.__main__ import judged, recorded, step_ms, table
from benchmarks.causes.cases import Case

SCRIPTS = Path(__file__).parent / "scripts"

_HEAD = """# Where a library trains

Twenty-four scripts with one mistake each, and six without, as users of transformers, Lightning, timm, torchvision,
PyTorch Geometric, Stable-Baselines3, albumentations, accelerate, MONAI, kornia, diffusers, OpenCLIP, skorch, fastai,
ignite and others write them. Somebody wrote them, in two times twelve and three, who had read nothing of dlprof
([after which threads](causes_log.md)), with the lines and remedies that count as right. How they are timed and judged
stands in [causes.md](causes.md); `python -m benchmarks.libraries --out docs/libraries.md` repeats it.

**At first sight 3 of 12 were right, both times**, fewer than of scripts in plain PyTorch: `landcover_seg`,
`molecules_pyg` and `tags_accelerate`, then `wind_zarr`, `tiles_kornia` and `soil_ignite`; of the second twelve the
cause and the remedy of three more (`intents_hf`, `bytes_xtrans`, `cells_smp_dist`), and not the line. What was wrong,
by kind, and is mended:

* Lightning calls the training step in a closure of the optimizer's step. What that does besides the passes, as a
  metric or a hook, was counted as the optimizer, and a fused one was advised. It is the script's own time now.
* A line like `trainer.train()` is in all that the training does, and its own text was taken for what it does there.
  Where nothing else is known of it, no change is advised any more.
* The first line was the import of a library in five of the first fifteen. A script needs the libraries that it
  imports: under 20 s, an import is no finding.
* What a library does is changed where the script tells it so: in arguments, callbacks and transforms. These lines are
  named now, for checkpoints, metrics of the Trainer, `map` of datasets, environments, crops, padding, attention,
  figures and data sets that keep nothing.
* Activations that are computed twice were only found on a GPU; what is computed twice in a step was not followed
  through attention, which can draw numbers, nor through batch norms, which write into their means.
* `encode(` of a model was taken for that of a tokeniser, in a line that computes a whole encoder.
* What validation does besides its passes, as to draw figures, was no finding of its own.
* Tables with an optimizer of their own (Adagrad beside AdamW) train the same with sparse gradients.
* A script that exchanges gradients piece by piece gains more by buckets than computation could hide of it.
* A part that is not trained was placed at `loss.backward()`, not where it is called.
* fastai hands a stand-in for its loader to PyTorch's iterators. That ended the recording; and a sample of one value
  with odd strides ended that of the loaders.

All were looked at before the kinds were mended, so that none is left to say how far that carries.

"""


@dataclass(frozen=True)
class Library(Case):
    """A case whose lines stand here; `folder`: where its script is."""

    at: tuple[int, ...] = ()
    folder: Path = SCRIPTS

    @property
    def command(self) -> list[str]:
        """The words that start the script."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [sys.executable, *(torchrun if self.ranks > 1 else ()), str(self.folder / f"{self.script}.py")]

    @property
    def lines(self) -> list[int]:
        """The lines of the mistake."""
        return [*self.at]


WAIT, BETWEEN = ("input_wait",), ("host_bound", "step_python")
CASES = (
    Library("vit_defects_hf", "datasets 5669", WAIT, ("Array3D",), at=(40, 47, 48)),
    Library(
        "mlm_logs_hf", "transformers 15466", ("validation_share",), ("preprocess_logits",), at=(44, 45, 68, 69, 70)
    ),
    Library("lora_support_chat", "peft 1142", ("needless_recompute",), ("gradient_checkpointing",), at=(37,)),
    Library("click_retrieval_lit", "torchmetrics 152", BETWEEN, ("once an epoch",), at=(23, 24, 38, 39)),
    Library(
        "forecast_lit",
        "pytorch-lightning 20075",
        ("checkpoint_stall", "periodic_work"),
        ("save_weights_only", "save every"),
        at=(62, 63),
    ),
    Library("keyword_spotter_lit", "wandb 2268", BETWEEN, ("every k-th",), at=(39, 40, 41)),
    Library("birds_timm", "pytorch-image-models 1141", ("needless_products",), ("once in a step",), at=(26, 31, 33)),
    Library("landcover_seg", "robosat 112", BETWEEN, ("with tensors",), at=(48, 49, 50, 73)),
    Library("molecules_pyg", "graphormer-pyg 24", ("costly_line",), ("one operation",), at=(37, 38, 39, 40, 41)),
    Library("elevator_ppo", "stable-baselines3 643", ("periodic_work",), ("DummyVecEnv",), at=(9, 67)),
    Library("leaves_albu", "torchgeo 3539", WAIT, ("crop",), at=(19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29)),
    Library(
        "tags_accelerate", "accelerate 1153", ("exposed_communication",), ("no_sync",), ranks=2, at=(43, 54, 55, 56)
    ),
    Library("spleen_monai", "MONAI 7498", WAIT, ("CacheDataset",), at=(60, 61, 62, 63, 64, 65, 79)),
    Library("wind_zarr", "zarr-python 567", WAIT, ("chunks of a sample",), at=(31, 48, 49)),
    Library("intents_hf", "DeepSpeedExamples 849", ("padding",), ("longest row",), at=(57, 75, 77)),
    Library("tiles_kornia", "kornia 1559", WAIT, ("augment the batch",), at=(40, 41, 42, 43, 44, 83)),
    Library(
        "bytes_xtrans", "x-transformers 136", ("unfused_attention",), ("attn_flash",), at=(58, 59, 60, 61, 62, 63, 64)
    ),
    Library("textures_diffusers", "diffusers 6076", ("unused_gradients",), ("requires_grad_(False)",), at=(67, 73, 80)),
    Library(
        "birdsong_clip",
        "PromptKD 33",
        ("frozen_forward",),
        ("once, before training",),
        at=(50, 51, 52, 53, 54, 55, 56, 81),
    ),
    Library("bakery_tft", "pytorch-forecasting 89", ("validation_share",), ("log_interval",), at=(92,)),
    Library("valve_skorch", "skorch 552", ("validation_share",), ("use_caching",), at=(65, 69, 70, 71, 72, 73, 74, 75)),
    Library("playlists_lit", "pytorch 5309", ("dense_gradient",), ("sparse=True",), at=(42, 43, 68, 80)),
    Library(
        "cells_smp_dist",
        "pytorch/examples 1146",
        ("exposed_communication", "small_collectives"),
        ("DistributedDataParallel",),
        ranks=2,
        at=(50, 51, 52, 53, 54, 55, 82),
    ),
    Library("soil_ignite", "pytorch 2138", ("float64_compute",), (".float()",), at=(65, 66, 72)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 where one is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[case.script for case in CASES], metavar="SCRIPT")
    parser.add_argument("--times", type=int, default=2, metavar="N", help="measure each way so often (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there")
    args = parser.parse_args(argv)
    rows = []
    for case in CASES:
        if args.only is not None and case.script not in args.only:
            continue
        with tempfile.TemporaryDirectory() as made:
            shutil.copy(SCRIPTS / f"{case.script}.py", made)
            patch = str(SCRIPTS / f"{case.script}.patch")
            subprocess.run(["git", "apply", patch], cwd=made, check=True)
            remedied = Library(case.script, case.after, (), (), ranks=case.ranks, folder=Path(made))
            times = [(step_ms(case, fixed=False), step_ms(remedied, fixed=False)) for _ in range(args.times)]
            plain, fixed = (median(each) for each in zip(*times, strict=True))
            rows.append(judged(case, recorded(case.command, Path(made) / "run"), plain, fixed))
        row = rows[-1]
        print(f"{case.script}: {'right' if row.right else 'WRONG'}, {row.first}: {row.said}", flush=True)
        print(f"    predicted {row.predicted:.2f}, measured {row.measured:.2f}", flush=True)
    text = table(rows)
    print(text)
    if args.out is not None:
        args.out.write_text(f"{_HEAD}{text}")
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
