#!/bin/sh
# prometheus.sh FOLDER: Debian's Prometheus with its promtool in FOLDER/usr/bin, unpacked and not
# installed, since the package would start a server. Prints the folder of both programs: that of PATH
# where they are there, else this one, which stays empty where there is no apt.
set -eu
if command -v promtool > /dev/null && command -v prometheus > /dev/null; then
    dirname "$(command -v prometheus)"
    exit
fi
mkdir -p "$1"
cd "$1"
echo "$PWD/usr/bin"
if [ ! -x usr/bin/promtool ]; then
    if ! command -v apt-get > /dev/null; then
        echo "no promtool: there is no apt-get to fetch it with" >&2
        exit
    fi
    {
        { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } \
            && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
    } > fetch.log 2>&1 || {
        echo "no promtool: see $1/fetch.log" >&2
    }
fi
