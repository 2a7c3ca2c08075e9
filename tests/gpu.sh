#!/usr/bin/env bash
# All GPU tests on one machine, in as many processes as argument 1 says (default 12), spread over its GPUs: compiling is
# most of their time. Argument 2, seconds, ends them early, with what failed so far; the rest goes to pytest.
# Prints the failures and one summary line for each process; exits 1 if anything failed.
set -u
cd "$(dirname "$0")/.."
processes=${1:-12}
seconds=${2:-900}
logs=$(mktemp -d)
mkdir "$logs/claims"
gpus=$(python3 -c "import torch; print(max(1, torch.cuda.device_count()))")
for i in $(seq 0 $((processes - 1))); do
  CUDA_VISIBLE_DEVICES=$((i % gpus)) PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} timeout -s INT -k 20 "$seconds" \
    python3 -m pytest -m gpu -q -p no:cacheprovider --share "$logs/claims" tests "${@:3}" >"$logs/$i.log" 2>&1 &
done
wait
failed=0
for log in "$logs"/*.log; do
  last=$(tail -n 1 "$log")
  case $last in
      *failed* | *error* | *Error* | *Interrupt* | *lost* | "") failed=1; grep -hE "^(FAILED|ERROR|E  )|Interrupt|is lost" "$log" | cut -c1-200 | head -n 30 ;;
  esac
  echo "$(basename "$log" .log): $last"
done
exit $failed
