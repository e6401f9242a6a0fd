#!/bin/sh
# The first machine. Runs are started here, or sent here with `raycloud submit`.
set -eu
export RAY_AUTH_MODE=token
ray get-auth-token --generate >/dev/null  # ~/.ray/auth_token: copy it to the other machines
chmod 600 ~/.ray/auth_token
ray start --head --port=6379 --dashboard-host=127.0.0.1 --disable-usage-stats \
  --labels=ray.io/market-type=on-demand,raycloud.io/price-per-hour=0.20
