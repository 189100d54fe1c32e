#!/usr/bin/env bash
# Checks the site that scripts/docs.sh has built, in headless Chromium: overflow, console errors, links and accessibility.
#   scripts/check_site.sh [FOLDER]     also takes pictures of some pages into FOLDER
# Needs Node.js, npm, and Chromium or Chrome, which CHROMIUM may name.
set -euo pipefail
pictures=${1:+$(realpath "$1")}
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
for browser in chromium chromium-browser google-chrome; do
    CHROMIUM=${CHROMIUM:-$(command -v "$browser" || true)}
done
[ -n "$CHROMIUM" ] || { echo "needs Chromium or Chrome" >&2; exit 2; }
npm install --silent --no-audit --no-fund --prefix .cache/site playwright-core@1 axe-core@4
CHROMIUM="$CHROMIUM" SITE_MODULES=.cache/site node scripts/check_site.mjs ${pictures:+"$pictures"}
