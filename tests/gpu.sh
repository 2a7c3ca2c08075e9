#!/usr/bin/env bash
# All GPU tests on one machine, in as many processes as argument 1 says (default 12): compiling is most of their time.
# Prints the failures and one summary line; exits 1 if anything failed.
set -u
cd "$(dirname "$0")/.."
shards=${1:-12}
logs=$(mktemp -d)
for i in $(seq 0 $((shards - 1))); do
  PYTHONPATH=src timeout 900 python3 -m pytest -m gpu -q -p no:cacheprovider --shard "$i/$shards" tests >"$logs/$i.log" 2>&1 &
done
wait
failed=0
for log in "$logs"/*.log; do
  last=$(tail -n 1 "$log")
  case $last in
    *failed* | *error* | *Error* | "") failed=1; grep -E "^(FAILED|ERROR|E  )|Error" "$log" | head -n 20 ;;
  esac
  echo "$(basename "$log" .log): $last"
done
exit $failed
