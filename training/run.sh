#!/bin/sh
# Data -> tokenizer -> target -> head with its report, on one GPU. From the repository's root, with specrs installed:
#   sh training/run.sh [intermediate folder]
set -eu
work=${1:-target/training}
assets=python/specrs/assets
model=$assets/pystdlib-16m
python=${PYTHON:-python3}

$python -m training.data --work "$work" --assets "$assets" --model "$model"
$python -m training.train_target --work "$work" --out "$model"
$python -m specrs train-head "$model" --out "$work/head" --text "$work/corpus.jsonl" --minutes 6 --intermediate 768
$python -m training.acceptance "$model" "$work/head"
