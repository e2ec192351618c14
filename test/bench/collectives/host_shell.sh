#!/bin/sh
# What mpirun calls as if it were ssh: host_shell.sh PREFIX ADDRESS COMMAND... runs the command in the network namespace
# PREFIX-N of the host with the address 10.77.0.(N + 1).
prefix=$1
address=$2
shift 2
exec ip netns exec "$prefix-$((${address##*.} - 1))" sh -c "$*"
