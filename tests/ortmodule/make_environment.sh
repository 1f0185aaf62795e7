#!/bin/sh
# Make an environment in which ORTModule trains on the CPU: usage make_environment.sh DIRECTORY
#
# onnxruntime-training 1.19 is built against torch 1.13 to 2.3 on CUDA. On the CPU it runs with Debian 12's own torch 1.13.1,
# which is unpacked, not installed, together with the libraries that it needs and this machine lacks. ONNX Runtime's
# extensions are then compiled against it (minutes). The last line that is printed on an error says what is missing.
set -eu

directory=$(mkdir -p "$1" && cd "$1" && pwd)
tree=$directory/debian
ready=$directory/ready
[ -e "$ready" ] && exit 0

fail() { echo "$1" >&2; exit 1; }
for tool in apt-get apt-cache dpkg g++ python3.11; do
    command -v "$tool" > /dev/null || fail "there is no $tool, and ORTModule's environment is made on Debian 12 with Python 3.11 and g++"
done
apt-cache policy python3-torch | grep -q 'Candidate: 1\.13' \
    || fail "apt-get offers no python3-torch 1.13, so this is not Debian 12, or apt-get update has not run"

mkdir -p "$directory/packages" "$tree"
packages=$(apt-get --simulate install --no-install-recommends python3-torch libtorch-dev pybind11-dev \
    | awk '/^Inst/ { print $2 }')
# What is installed here need not be unpacked, but for the three themselves.
(cd "$directory/packages" && apt-get download --quiet --quiet $packages python3-torch libtorch-dev pybind11-dev) \
    || fail "apt-get could not download Debian's torch"
for package in "$directory"/packages/*.deb; do dpkg --extract "$package" "$tree"; done
rm -r "$directory/packages"

python3.11 -m venv "$directory"
"$directory/bin/python" -m pip install --quiet setuptools==68.2.2 wheel \
    numpy==1.26.4 onnx==1.16.2 protobuf==4.25.9 onnxruntime-training==1.19.2 typing_extensions sympy ninja \
    "pyarrow>=15,<26" "fsspec>=2024.2" "jinja2>=3.1" "rich>=13" "safetensors>=0.4" "typer>=0.12" "llvmlite>=0.43" \
    || fail "pip could not install onnxruntime-training 1.19.2"
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for part in torch torchgen functorch; do ln -sfn "$tree/usr/lib/python3/dist-packages/$part" "$site/$part"; done

libraries=$tree/usr/lib/x86_64-linux-gnu
cat > "$directory/bin/python-with-torch" << END
#!/bin/sh
export LD_LIBRARY_PATH=$libraries:$tree/lib/x86_64-linux-gnu:$tree/usr/lib:$libraries/blas:$libraries/lapack
export CPATH=$tree/usr/include LIBRARY_PATH=$libraries:$tree/usr/lib
exec $directory/bin/python "\$@"
END
chmod +x "$directory/bin/python-with-torch"
"$directory/bin/python-with-torch" -c 'import torch; torch.ones(2).numpy()' || fail "Debian's torch cannot be imported"
MAX_JOBS=${MAX_JOBS:-1} "$directory/bin/python-with-torch" -m onnxruntime.training.ortmodule.torch_cpp_extensions.install \
    > "$directory/extensions.log" 2>&1 || fail "ONNX Runtime's extensions could not be compiled: see $directory/extensions.log"
touch "$ready"
