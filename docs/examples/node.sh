#!/bin/sh
# Every other machine: sh node.sh ADDRESS-OF-THE-FIRST
set -eu
export RAY_AUTH_MODE=token
ray start --address="$1:6379" \
  --labels=ray.io/market-type=spot,raycloud.io/price-per-hour=0.48
