"""Fine-tuning the image tower of a small CLIP (open_clip) on spectrogram pictures.

The text tower stays as it was pretrained; classes are described by prompt templates.
"""
import time

import open_clip
import torch
import torch.nn.functional as F
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from torch.utils.data import DataLoader, TensorDataset

SPECIES = [
    "wren", "robin", "blackbird", "song thrush", "nuthatch", "treecreeper", "chaffinch", "goldfinch",
    "siskin", "linnet", "skylark", "woodlark", "nightingale", "redstart", "wheatear", "stonechat",
    "dunnock", "starling", "cuckoo", "hoopoe", "kingfisher", "swift", "swallow", "house martin",
    "blue tit", "great tit", "coal tit", "marsh tit", "goldcrest", "chiffchaff",
]
TEMPLATES = [
    "a spectrogram of the song of a {}.",
    "a spectrogram of the call of a {}.",
    "a noisy recording of a {}.",
    "a clean recording of a {}.",
    "a {} singing at dawn.",
    "a {} with other birds in the background.",
]
SIZE = 64
BATCH = 16
STEPS = 130
WARMUP = 5


def make_spectrograms(count=960):
    gen = torch.Generator().manual_seed(2)
    labels = torch.randint(len(SPECIES), (count,), generator=gen)
    axis = torch.linspace(0, 1, SIZE)
    pitch = 0.15 + 0.7 * (labels.float() / len(SPECIES))[:, None, None]
    sweep = 0.1 * torch.sin(6.28 * (labels % 5 + 1)[:, None, None] * axis[None, None, :])
    ridge = torch.exp(-((axis[None, :, None] - pitch - sweep) ** 2) / 0.002)
    image = ridge[:, None].repeat(1, 3, 1, 1)
    return image + 0.3 * torch.randn(count, 3, SIZE, SIZE, generator=gen), labels


def build_clip():
    vision = CLIPVisionCfg(layers=4, width=192, head_width=32, patch_size=8, image_size=SIZE)
    text = CLIPTextCfg(context_length=32, vocab_size=49408, width=160, heads=5, layers=4)
    return CLIP(embed_dim=128, vision_cfg=vision, text_cfg=text)


def class_weights(model, tokenizer):
    """One normalised text embedding per species, averaged over the templates."""
    prompts = [template.format(name) for name in SPECIES for template in TEMPLATES]
    with torch.no_grad():
        features = model.encode_text(tokenizer(prompts), normalize=True)
    features = features.view(len(SPECIES), len(TEMPLATES), -1).mean(1)
    return F.normalize(features, dim=-1)


def accuracy(logits, target):
    return (logits.argmax(-1) == target).float().mean()


def main():
    torch.manual_seed(0)
    model = build_clip()
    tokenizer = open_clip.SimpleTokenizer(context_length=32)
    model.transformer.requires_grad_(False)
    model.token_embedding.requires_grad_(False)
    model.ln_final.requires_grad_(False)
    model.positional_embedding.requires_grad_(False)
    model.text_projection.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-4, weight_decay=0.05)

    images, labels = make_spectrograms()
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True, drop_last=True)
    step, marks, hits = 0, [], []
    model.train()
    while step < STEPS:
        for image, target in loader:
            weights = class_weights(model, tokenizer)
            image_features = model.encode_image(image, normalize=True)
            logits = model.logit_scale.exp() * image_features @ weights.T
            loss = F.cross_entropy(logits, target)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, 4.6052)
            hits.append(accuracy(logits.detach(), target))
            step += 1
            marks.append(time.perf_counter())
            if step % 20 == 0:
                recent = torch.stack(hits[-20:]).mean().item()
                print(f"step {step}: loss {loss.item():.4f}, accuracy {recent:.3f}")
            if step == STEPS:
                break

    steps = torch.tensor(marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"final loss {loss.item():.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
