#!/bin/sh
# sh run_inference.sh GPU script.py flags…: a program on one GPU, in the environment that run.sh finds or makes.
set -eu

case ${1:-} in
'' | *[!0-9,]*)
    printf '%s\n' "usage: sh run_inference.sh GPU script.py [flags]" \
        "  for example sh run_inference.sh 0 alpaca_rlhf/inference/llama_chatbot_gradio.py --path output/final/actor" \
        "  GPU: its number, or several with commas; on a machine without one, 0 runs on the CPU" >&2
    exit 2
    ;;
esac
CUDA_VISIBLE_DEVICES=$1
export CUDA_VISIBLE_DEVICES
shift
printf '%s\n' "$(date '+%Y-%m-%d %H:%M:%S') starting $*"
exec sh "$(dirname -- "$0")/run.sh" python "$@"
