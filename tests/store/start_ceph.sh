#!/bin/bash
# start_ceph.sh FOLDER S3_PORT MONITOR_PORT: one monitor, one disk and an S3 gateway of Ceph 16 or later on the loopback
# interface. The user of the gateway has the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. Process ids are in
# FOLDER/run/*.pid.
set -euo pipefail
folder=$1 s3_port=$2 monitor=v2:127.0.0.1:$3
mkdir -p "$folder"/{mon,osd,rgw,log,run}
export CEPH_CONF=$folder/ceph.conf
fsid=$(cat /proc/sys/kernel/random/uuid) osd=$(cat /proc/sys/kernel/random/uuid)
cat > "$CEPH_CONF" <<END
[global]
fsid = $fsid
mon host = [$monitor]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = $folder/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
mon allow pool size one = true
osd crush chooseleaf type = 0
bluestore block size = 4294967296
osd memory target = 939524096
mon data = $folder/mon
osd data = $folder/osd
rgw data = $folder/rgw
run dir = $folder/run
log file = $folder/log/\$name.log
admin socket = $folder/run/\$name.asok
pid file = $folder/run/\$name.pid
[client.rgw.a]
# Without tcp_nodelay every request takes 44 ms instead of 1 to 2.
rgw frontends = beast endpoint=127.0.0.1:$s3_port tcp_nodelay=1
keyring = $folder/keyring
END
quietly() { "$@" >> "$folder/log/start.txt" 2>&1 || { cat "$folder/log/start.txt" >&2; exit 1; }; }
quietly ceph-authtool --create-keyring "$folder/keyring" --gen-key -n mon. --cap mon 'allow *'
for name in client.admin client.rgw.a osd.0; do
  quietly ceph-authtool "$folder/keyring" --gen-key -n $name --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
done
quietly monmaptool --create --fsid "$fsid" --addv a "[$monitor]" "$folder/monmap"
quietly ceph-mon --mkfs -i a --monmap "$folder/monmap"
quietly ceph-mon -i a
quietly timeout 60 ceph osd new "$osd" 0
quietly ceph-osd -i 0 --mkfs --osd-uuid "$osd"
quietly ceph-osd -i 0
quietly timeout 60 ceph osd crush add 0 1.0 root=default host=localhost
quietly timeout 60 radosgw -n client.rgw.a
for _ in $(seq 120); do
  curl -s -m 2 -o /dev/null "http://127.0.0.1:$s3_port" && break
  sleep 0.5
done
quietly timeout 60 radosgw-admin user create --uid=test --display-name=test \
  --access-key="$AWS_ACCESS_KEY_ID" --secret-key="$AWS_SECRET_ACCESS_KEY"
