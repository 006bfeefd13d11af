"""Supervised fine-tuning by TRL's SFTTrainer, stock and with our fused lm head in its place: the same losses.

    python examples/trl_sft.py

A tiny Llama, made from a config, learns sources of Python's standard library. One line, `apply()`, puts our head in
the place of TRL's in every trainer of the process, and `restore()` puts TRL's back. It runs on a GPU where there is
one, and takes half a minute on a CPU.
"""

import argparse
import ast
import bisect
import tempfile
import textwrap

import hf_directory
import text
import torch
from program import take_no_arguments

from megatron_ext.integrations import trl

STEPS, BATCH, VOCAB = 8, 4, 512
LETTERS = 400  # letters of a row of the data set


def train() -> list[float]:
    """Fine-tune by TRL, without a call of ours; return the loss of each step."""
    from datasets import Dataset, disable_progress_bars
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    sources = text.documents([module.__file__ for module in (argparse, ast, bisect, textwrap)])
    rows = [source[start : start + LETTERS] for source in sources for start in range(0, len(source), LETTERS)]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-2,
            bf16=False,  # in fp32 the losses are equal to more digits
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = SFTTrainer(
            model=hf_directory.new_model(hidden_size=64, layers=2, vocab_size=VOCAB, tied=False, seed=0),
            args=config,
            processing_class=hf_directory.new_tokenizer(sources, VOCAB),
            train_dataset=Dataset.from_dict({"text": rows[: STEPS * BATCH]}),
        )
        trainer.remove_callback(PrinterCallback)  # main() prints the losses with more digits
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def main() -> None:
    stock = train()
    trl.apply()
    try:
        ours = train()
        report = trl.report()
    finally:
        trl.restore()
    for step, (theirs, fused) in enumerate(zip(stock, ours, strict=True)):
        print(f"step {step}  TRL's head {theirs:.5f}  ours {fused:.5f}")
    print(report)


if __name__ == "__main__":
    take_no_arguments(__doc__)
    main()
