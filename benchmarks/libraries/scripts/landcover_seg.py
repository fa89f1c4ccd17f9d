"""Land-cover segmentation with torchvision's LR-ASPP; the mean IoU of training goes to the log."""
import time

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, jaccard_score, precision_score, recall_score
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
from torchvision.transforms import v2

CLASSES = ["water", "forest", "field", "road", "roof"]
TILE = 128
STEPS = 60
WARMUP = 5


class Tiles(Dataset):
    def __init__(self, n, seed=0):
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, len(CLASSES), (n, 8, 8))
        self.masks = torch.from_numpy(coarse.repeat(TILE // 8, 1).repeat(TILE // 8, 2))
        noise = torch.from_numpy(rng.integers(0, 40, (n, 3, TILE, TILE)))
        self.images = (self.masks[:, None] * 40 + noise).to(torch.uint8)
        self.transform = v2.Compose([
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
            v2.Normalize(mean=[0.5] * 3, std=[0.25] * 3),
        ])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(tv_tensors.Image(self.images[i]), tv_tensors.Mask(self.masks[i]))


class SegmentationMeter:
    """Running means of the macro-averaged scores of the batches."""

    def __init__(self, num_classes):
        self.options = dict(labels=list(range(num_classes)), average="macro", zero_division=0)
        self.scores = []

    def update(self, prediction, target):
        y_pred, y_true = prediction.flatten().numpy(), target.flatten().numpy()
        self.scores.append([metric(y_true, y_pred, **self.options)
                            for metric in (jaccard_score, precision_score, recall_score, f1_score)])

    def report(self):
        return "IoU {:.4f} precision {:.4f} recall {:.4f} F1 {:.4f}".format(*np.mean(self.scores, axis=0))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Tiles(STEPS * 8), batch_size=8, shuffle=True)
    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=len(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    meter = SegmentationMeter(len(CLASSES))

    model.train()
    for step, (images, masks) in enumerate(loader):
        if step == WARMUP:
            start = time.perf_counter()
        masks = masks.long()
        logits = model(images)["out"]
        loss = F.cross_entropy(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(logits.detach().argmax(1), masks)
        if step % 20 == 0:
            print(f"step {step:3d} loss {loss.item():.4f} {meter.report()}")
    elapsed = time.perf_counter() - start
    print(f"final loss {loss.item():.4f} {meter.report()}")
    print(f"{elapsed / (STEPS - WARMUP) * 1000:.1f} ms per step")


if __name__ == "__main__":
    main()
