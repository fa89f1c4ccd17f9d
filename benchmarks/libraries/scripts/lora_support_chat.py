"""LoRA fine-tuning of a small Llama on support dialogues, own loop with accelerate."""
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 1000
SEQ_LEN = 128
STEPS = 60
WARMUP = 5


class DialogueDataset(Dataset):
    """Pre-tokenized dialogues of equal length."""

    def __init__(self, n, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCAB_SIZE, (n, SEQ_LEN), generator=gen)
        self.ids[:, 1::2] = (self.ids[:, ::2] * 3 + 1) % VOCAB_SIZE

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def build_model():
    config = LlamaConfig(vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=704,
                         num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
                         max_position_embeddings=SEQ_LEN, use_cache=False)
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type="CAUSAL_LM",
                      target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    return model


def main():
    set_seed(11)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(DialogueDataset(STEPS * 6), batch_size=6, shuffle=True)
    model = build_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for step, batch in enumerate(loader):
        if step == WARMUP:
            start = time.perf_counter()
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}")
    elapsed = time.perf_counter() - start
    accelerator.print(f"final loss {loss.item():.4f}")
    accelerator.print(f"{elapsed / (STEPS - WARMUP) * 1000:.1f} ms per step")


if __name__ == "__main__":
    main()
