"""One thread per process: the models are tiny, and idle OpenMP threads on shared cores cost more than they give."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import logging

import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
logging.getLogger("transformers").setLevel(logging.ERROR)
