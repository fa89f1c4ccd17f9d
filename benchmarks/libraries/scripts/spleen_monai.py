"""3D organ segmentation from CT volumes with a MONAI U-Net (patch based)."""
import tempfile
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from monai.data import DataLoader, Dataset, list_data_collate
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    CropForegroundd,
    EnsureChannelFirstd,
    LoadImaged,
    Orientationd,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandShiftIntensityd,
    ScaleIntensityRanged,
    Spacingd,
)
from monai.utils import set_determinism

EPOCHS = 10
BATCH = 2
WARMUP = 5
PATCH = (48, 48, 32)


def write_volumes(root, count=24, shape=(96, 96, 40)):
    """Phantoms that look roughly like an abdomen: soft tissue, spine, spleen."""
    rng = np.random.default_rng(7)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, s) for s in shape], indexing="ij"))
    files = []
    for index in range(count):
        body = (grid[0] / 0.85) ** 2 + (grid[1] / 0.7) ** 2 < 1
        centre = np.array([0.35, 0.1, 0.0]) + rng.uniform(-0.12, 0.12, 3)
        radius = rng.uniform(0.22, 0.34)
        spleen = ((grid - centre[:, None, None, None]) ** 2).sum(0) < radius**2
        spine = (grid[0] ** 2 + (grid[1] - 0.45) ** 2) < 0.02
        volume = np.full(shape, -1000.0)
        volume[body] = 40
        volume[spine] = 500
        volume[spleen] = 110
        volume += rng.normal(0, 18, shape)
        affine = np.diag([-0.8, -0.8, 2.5, 1.0])
        image, label = root / f"ct_{index:03d}.nii.gz", root / f"seg_{index:03d}.nii.gz"
        nib.save(nib.Nifti1Image(volume.astype(np.int16), affine), image)
        nib.save(nib.Nifti1Image(spleen.astype(np.uint8), affine), label)
        files.append({"image": str(image), "label": str(label)})
    return files


def train_transforms():
    keys = ["image", "label"]
    return Compose(
        [
            LoadImaged(keys=keys),
            EnsureChannelFirstd(keys=keys),
            Orientationd(keys=keys, axcodes="RAS"),
            Spacingd(keys=keys, pixdim=(1.0, 1.0, 2.0), mode=("bilinear", "nearest")),
            ScaleIntensityRanged(keys=["image"], a_min=-57, a_max=164, b_min=0.0, b_max=1.0, clip=True),
            CropForegroundd(keys=keys, source_key="image", allow_smaller=True),
            RandCropByPosNegLabeld(
                keys=keys, label_key="label", spatial_size=PATCH, pos=1, neg=1, num_samples=2
            ),
            RandFlipd(keys=keys, prob=0.3, spatial_axis=0),
            RandShiftIntensityd(keys=["image"], offsets=0.1, prob=0.5),
        ]
    )


def main():
    set_determinism(seed=0)
    with tempfile.TemporaryDirectory() as folder:
        files = write_volumes(Path(folder))
        train_ds = Dataset(data=files, transform=train_transforms())
        train_loader = DataLoader(train_ds, batch_size=BATCH, shuffle=True, collate_fn=list_data_collate)

        model = UNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            channels=(8, 16, 32, 64),
            strides=(2, 2, 2),
            num_res_units=1,
        )
        loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-5)

        step, marks = 0, []
        for epoch in range(EPOCHS):
            model.train()
            epoch_loss = 0.0
            for batch in train_loader:
                images, labels = batch["image"], batch["label"]
                optimizer.zero_grad()
                outputs = model(images)
                loss = loss_function(outputs, labels)
                loss.backward()
                optimizer.step()
                epoch_loss += loss.item()
                step += 1
                marks.append(time.perf_counter())
            print(f"epoch {epoch + 1}: mean loss {epoch_loss / len(train_loader):.4f}")

    steps = np.diff(marks)[WARMUP:]
    print(f"final loss {loss.item():.4f}")
    print(f"{1000 * steps.mean():.1f} ms per step")


if __name__ == "__main__":
    main()
