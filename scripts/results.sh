#!/usr/bin/env bash
# The exact commands behind "Results" in the README. Takes hours on one CPU core.
# PERFED_DATA: a folder that holds MNIST/raw (else MNIST is downloaded). CIFAR: an image folder, train/<class>/, test/<class>/.
set -euo pipefail
run="python -m perfed"
paper="n=50 r=0.2 rounds=1000 batch=40 beta=0.001 alpha=0.01 eval_every=250 engine.threads=1 engine.compile=true"

# MNIST, 5 seeds: four methods and local training; FedAvg with the gradient evaluations of HF (4 a step)
$run -m algo=fedavg,perfedavg_fo,perfedavg_hf,perfedavg,local tau=10,4 dataset=mnist seeds=5 $paper outputs=outputs/mnist
$run -m algo=fedavg tau=40,16 dataset=mnist seeds=5 $paper outputs=outputs/mnist
python -m perfed.rescore outputs/mnist/*-mnist-* protocol=paper engine.threads=1
python -m perfed.report --format markdown outputs/mnist/*-mnist-*
python -m perfed.report --format markdown outputs/mnist/*/eval-paper-*

# CIFAR-10 as an image folder, 3 seeds, one row
cifar="dataset=imagefolder dataset.path=${CIFAR:-cifar10} partition.a=68 partition.a_test=34"
$run -m algo=fedavg,perfedavg_fo,perfedavg_hf,perfedavg,local tau=4 $cifar seeds=3 $paper outputs=outputs/cifar
$run algo=fedavg tau=16 $cifar seeds=3 $paper outputs=outputs/cifar
python -m perfed.rescore outputs/cifar/*-imagefolder-* protocol=paper engine.threads=1
python -m perfed.report --format markdown outputs/cifar/*-imagefolder-*
python -m perfed.report --format markdown outputs/cifar/*/eval-paper-*

# All methods: MNIST, 200 rounds each; the embedded digits, equal budgets of gradient evaluations
$run experiment=all_methods dataset=mnist n=50 rounds=200 eval_every=50 study.budget=null study.tuning_share=0.25
$run experiment=all_methods
