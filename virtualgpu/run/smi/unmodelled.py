"""What the real nvidia-smi can do beside, and virtual GPUs do not model: by option or command, the words that follow that sentence."""

_LIVE = "--query-gpu=index,utilization.gpu,memory.used --format=csv -l 1 shows utilization and memory"
_QUERY = "--query-gpu with the fields that are wanted does it (--help-query-gpu lists them)"
_CHANGE = "there is no driver whose settings it could change"
_REST = "-L, --query-gpu, topo -m and the plain table are"

NOT_MODELLED = {
    name: words
    for words, names in {
        _LIVE: "dmon pmon daemon replay stats",
        _QUERY: "-q --query -x --xml-format -d --display -u --unit --dtd --query-supported-clocks",
        _CHANGE: """
            -pm --persistence-mode -pl --power-limit -r --gpu-reset -c --compute-mode -e --ecc-config -p --reset-ecc-errors
            -am --accounting-mode -caa --clear-accounted-apps -ac --applications-clocks -rac --reset-applications-clocks
            -lgc --lock-gpu-clocks -rgc --reset-gpu-clocks -lmc --lock-memory-clocks -rmc --reset-memory-clocks
            -mig --multi-instance-gpu -gtt --gpu-target-temp --gom clocks drain mig boost-slider power-hint compute-policy
        """,
        _REST: """
            -B --list-excluded-gpus --query-accounted-apps --query-retired-pages --query-remapped-rows --debug
            vgpu encodersessions fbcsessions conf-compute c2c gpm pci power-smoothing power-profiles
        """,
    }.items()
    for name in names.split()
}
