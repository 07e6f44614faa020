#!/usr/bin/env bash
# The exact commands behind every table that the README shows, and the studies that it names. Hours on two CPU cores; what has
# ended is not trained again, so it can be interrupted. PERFED_DATA: a folder with MNIST/raw (else MNIST is downloaded). CIFAR:
# CIFAR-10 as an image folder, train/<class>/ and test/<class>/ (else dataset=cifar10 is taken, and downloaded).
set -euo pipefail
out=${OUT:-outputs}
run="${PYTHON:-python} -m perfed outputs=$out"
cifar=(${CIFAR:+"study.cifar=$CIFAR"})

# The main job
$run

# Figure 1a (accuracy against time), appendix I (ARUBA, figure 1b) and the sweep over alpha, on the embedded digits; Table 1 shows what
# the comparison with ARUBA found
$run experiment=fig1 row=digits_tau4
$run experiment=aruba row=digits_tau4
$run experiment=alpha_sweep row=digits_tau4

# Table 1 and its verdicts: both MNIST rows with 5 seeds and both networks, one of them with a larger network
# and with tuned steps; a row of CIFAR-10, 3 seeds
$run experiment=table1 "study.rows=[mnist_tau10,mnist_tau4]" "study.networks=[mlp,langelaar]" study.tuned=false engine.compile=true
$run experiment=table1 "study.rows=[mnist_tau4]" "study.networks=[mlp,mlp_large]" study.tuned=false engine.compile=true
$run experiment=table1 "study.rows=[mnist_tau4]" "study.networks=[mlp]" engine.compile=true
$run experiment=table1 "study.rows=[cifar10_tau4_alpha01]" "study.networks=[mlp]" study.tuned=false seeds=3 engine.compile=true "${cifar[@]}"

# The same questions on the embedded digits, with tuned steps
$run experiment=table1_quick

# All methods: MNIST, 200 rounds each; the embedded digits, equal budgets of gradient evaluations
$run experiment=all_methods dataset=mnist n=50 rounds=200 eval_every=50 study.budget=null study.tuning_share=0.25
$run experiment=all_methods

# Is EASGD more stable than ADMM? Maps, verdicts, curves
$run experiment=easgd_vs_admm

# A sweep of six jobs: one fails, two are interrupted
${PYTHON:-python} scripts/sweep_demo.py

# Speed
${PYTHON:-python} scripts/bench.py
${PYTHON:-python} scripts/bench.py --threads 2
${PYTHON:-python} scripts/bench.py --all --repeats 3
