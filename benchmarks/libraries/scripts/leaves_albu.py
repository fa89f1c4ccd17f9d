"""Leaf-disease classification: photos read with OpenCV, augmented with albumentations."""
import os
import tempfile
import time

import albumentations as A
import cv2
import numpy as np
import torch
import torch.nn.functional as F
from albumentations.pytorch import ToTensorV2
from torch.utils.data import DataLoader, Dataset
from torchvision.models import shufflenet_v2_x0_5

PHOTO, CROP = 512, 96
DISEASES = 6
BATCH, STEPS, WARMUP = 16, 60, 5

train_transform = A.Compose([
    A.HorizontalFlip(p=0.5),
    A.VerticalFlip(p=0.5),
    A.RandomBrightnessContrast(p=0.5),
    A.HueSaturationValue(p=0.5),
    A.ISONoise(p=0.5),
    A.GaussNoise(std_range=(0.02, 0.08), p=0.5),
    A.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    A.RandomCrop(CROP, CROP),
    ToTensorV2(),
], seed=0)


def write_photos(folder, n, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(n):
        label = int(rng.integers(DISEASES))
        small = rng.integers(0, 160, (32, 32, 3), dtype=np.uint8)
        small[..., label % 3] += 15 * (label + 1)
        path = os.path.join(folder, f"leaf_{i:04d}.jpg")
        cv2.imwrite(path, cv2.resize(small, (PHOTO, PHOTO)))
        samples.append((path, label))
    return samples


class LeafDataset(Dataset):
    def __init__(self, samples, transform):
        self.samples, self.transform = samples, transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        path, label = self.samples[i]
        image = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
        return self.transform(image=image)["image"], label


def train(samples):
    torch.manual_seed(0)
    loader = DataLoader(LeafDataset(samples, train_transform), batch_size=BATCH, shuffle=True,
                        drop_last=True)
    model = shufflenet_v2_x0_5(weights=None, num_classes=DISEASES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < STEPS:
        for images, labels in loader:
            if step == WARMUP:
                start = time.perf_counter()
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == STEPS:
                break
    print(f"{(time.perf_counter() - start) / (STEPS - WARMUP) * 1000:.1f} ms per step")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(write_photos(folder, 320))
