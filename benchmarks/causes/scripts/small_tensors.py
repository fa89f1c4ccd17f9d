"""A worker hands over hundreds of small tensors a batch, one by one. --fixed: each field is one tensor, split later."""

import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIELDS = ("boxes", "labels", "area", "iscrowd", "image_id", "orig_size", "size")


class Detections(Dataset):
    """Pictures with as many boxes as it happens, in the form of COCO."""

    def __init__(self, count=20_000, side=32):
        self.count, self.side = count, side
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(256, 3, side, side, generator=generator)
        self.boxes = torch.rand(4_000, 4, generator=generator)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        objects = 1 + index % 7
        first = (37 * index) % 3_900
        boxes = self.boxes[first : first + objects]
        target = {
            "boxes": boxes,
            "labels": torch.arange(objects) % 5,
            "area": boxes[:, 2] * boxes[:, 3],
            "iscrowd": torch.zeros(objects, dtype=torch.int64),
            "image_id": torch.tensor([index]),
            "orig_size": torch.tensor([self.side, self.side]),
            "size": torch.tensor([self.side, self.side]),
        }
        return self.images[index % 256], target


def collate(samples):
    images, targets = zip(*samples, strict=True)
    if not FIXED:
        return torch.stack(images), list(targets)  # the cause
    packed = {field: torch.cat([target[field] for target in targets]) for field in FIELDS}
    counts = torch.tensor([[len(target[field]) for field in FIELDS] for target in targets])
    return torch.stack(images), (packed, counts)


def unpack(targets):
    if isinstance(targets, list):
        return targets
    packed, counts = targets
    columns = counts.T.tolist()
    parts = {field: packed[field].split(column) for field, column in zip(FIELDS, columns, strict=True)}
    return [{field: parts[field][n] for field in FIELDS} for n in range(len(counts))]


class Detector(nn.Module):
    def __init__(self, queries=8, width=16, classes=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=4), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.queries = queries
        self.boxes = nn.Linear(9 * width, 4 * queries)
        self.classes = nn.Linear(9 * width, classes * queries)

    def forward(self, x):
        features = self.backbone(x)
        boxes = self.boxes(features).sigmoid().view(len(x), self.queries, 4)
        return boxes, self.classes(features).view(len(x), self.queries, -1)


def loss_of(boxes, classes, targets):
    rows = torch.cat([torch.full_like(target["labels"], n) for n, target in enumerate(targets)])
    columns = torch.cat([torch.arange(len(target["labels"])) for target in targets])
    wanted = torch.cat([target["boxes"] for target in targets])
    labels = torch.cat([target["labels"] for target in targets])
    box_loss = nn.functional.l1_loss(boxes[rows, columns], wanted)
    return box_loss + nn.functional.cross_entropy(classes[rows, columns], labels)


model = Detector()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
loader = DataLoader(Detections(), batch_size=24, shuffle=True, num_workers=1, collate_fn=collate)
clock = Clock(150)
for images, targets in loader:
    loss = loss_of(*model(images), unpack(targets))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
