"""Fine-tunes a deep, narrow vision transformer on solder joints, with a learning rate that decays by stage."""

import argparse
import time

import torch
from torch import nn

CFG = {
    "side": 32,
    "patch": 8,
    "width": 32,
    "depth": 40,
    "heads": 2,
    "classes": 6,
    "batch": 6,
    "lr": 2e-4,
    "decay": 0.05,
    "stages": 4,
    "stage_decay": 0.6,
}


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma1, self.gamma2 = nn.Parameter(torch.full((width,), 0.1)), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.gamma1 * self.proj(mixed)
        return x + self.gamma2 * self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class NarrowViT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, cfg["width"], cfg["patch"], stride=cfg["patch"])
        self.pos_embed = nn.Parameter(torch.zeros(1, (cfg["side"] // cfg["patch"]) ** 2, cfg["width"]))
        self.layers = nn.ModuleList(Layer(cfg["width"], cfg["heads"]) for _ in range(cfg["depth"]))
        self.norm, self.head = nn.LayerNorm(cfg["width"]), nn.Linear(cfg["width"], cfg["classes"])

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def stage_of(name, cfg):
    if name.startswith("layers."):
        return int(name.split(".")[1]) * cfg["stages"] // cfg["depth"]
    return 0 if name.startswith(("patch_embed", "pos_embed")) else cfg["stages"]


def param_groups(model, cfg, merge):
    groups = {}
    for name, parameter in model.named_parameters():
        stage = stage_of(name, cfg)
        weight_decay = 0.0 if parameter.ndim == 1 or name == "pos_embed" else cfg["decay"]
        key = (stage, weight_decay) if merge else name  # the cause
        if key not in groups:
            scale = cfg["stage_decay"] ** (cfg["stages"] - stage)
            groups[key] = {"params": [], "lr": cfg["lr"] * scale, "weight_decay": weight_decay}  # the cause
        groups[key]["params"].append(parameter)
    return list(groups.values())


def solder_joints(cfg, templates):
    labels = torch.randint(cfg["classes"], (cfg["batch"],))
    return templates[labels] + 0.5 * torch.randn(cfg["batch"], 3, cfg["side"], cfg["side"]), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=140)
    args = parser.parse_args()
    torch.manual_seed(0)
    templates = torch.rand(CFG["classes"], 3, CFG["side"], CFG["side"])
    model = NarrowViT(CFG)
    optimizer = torch.optim.AdamW(param_groups(model, CFG, merge=args.fixed), betas=(0.9, 0.98), foreach=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        images, labels = solder_joints(CFG, templates)
        loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
