#!/bin/sh
# Data -> tokenizer -> target -> generated text -> head -> evaluation, on one GPU. From the repository's root:
#   sh training/run.sh [intermediate folder]
set -eu
work=${1:-target/training}
assets=python/specrs/assets
model=$assets/pystdlib-16m
head=$assets/pystdlib-16m-eagle3
python=${PYTHON:-python3}

$python -m training.data --work "$work" --assets "$assets" --model "$model"
$python -m training.train_target --work "$work" --out "$model"
$python -m training.generate --work "$work" --model "$model"
$python -m training.train_head --work "$work" --model "$model" --out "$head"
$python -m training.evaluate --model "$model" --head "$head" --prompts "$assets/heldout_prompts.json" --out "$work/eval.json"
