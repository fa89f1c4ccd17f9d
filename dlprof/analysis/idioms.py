"""What a slow line of a script is known to be: a row each for the ways of writing it, its remedy, and a page about it.

A line is known by its source, or by the functions of libraries that it was seen in. Rules that have found an expensive
line look it up here with `known`. Without an entry they name the line and say that they know no remedy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache

from msgspec import Struct

# Where a line stands: in the making of a sample or batch (by a worker or the training thread), or in the loop.
DATA = ("worker", "fetch")
LOOP = ("rest", "forward", "backward", "optimizer")
# Before the first step: on the training thread, and in the workers for whose first batch it waits.
START = ("start",)
START_WORKER = ("start_worker",)


class Idiom(Struct, frozen=True):
    """One way of writing that costs time.

    `what`: what the line does, as "opens an archive for every sample". `remedy`: the change as its user would write it.
    `source`, `frames`: regular expressions, of which one must be found in the text of the line, or in what it calls,
    "function (file)". `doing`: where such a line stands. `first`: the line is needless work, so that its remedy comes
    before more workers; else it is work that somebody has to do. `last`: what the line calls says more than its source.
    `around`: as `frames`, but whatever is called within it. `unless`: as `frames`, of what the line must not call.
    `loops`: it is one of a loop whose turns could be done at once. `beside`: the lines around it are part of it. Of
    lines of which is known what they call: `only`: as `frames`, of each operator; `often`: it calls so many operators
    in a step. `at`: functions and keywords with which a script tells a library to do so: where it is changed.
    """

    name: str
    what: str
    remedy: str
    link: str
    doing: tuple[str, ...]
    source: str = ""
    frames: str = ""
    first: bool = True
    last: bool = False
    around: str = ""
    unless: str = ""
    loops: bool = False
    beside: bool = False
    only: str = ""
    often: int = 0
    at: tuple[str, ...] = ()

    def fits(self, operators: Collection[str], calls: int) -> bool:
        """Return whether a line that calls these operators, so many times together, can be this."""
        return calls >= self.often and all(re.match(self.only, name) for name in operators)


# A line that differentiates: what it creates is differentiated once more in the backward pass.
JACOBIAN = "jacobian_by_rows"

# Pictures that are made anew for each epoch by what comes out the same, as the names of their transforms say; and the
# work on pictures that this is then.
SAME_PICTURES = "same_pictures"
OF_PICTURES = ("augmented", "picture_resized", "picture_to_tensor")
CROPPED_LATE = "cropped_late"
CROPS = ("RandomCrop", "CenterCrop", "RandomResizedCrop", "RandomSizedCrop", "Resize", "SmallestMaxSize")
# What takes next to no time before a crop.
CHEAP = frozenset(("HorizontalFlip", "VerticalFlip", "RandomHorizontalFlip", "RandomVerticalFlip", "ToPILImage"))
DRAW_NOTHING = frozenset(
    (
        *("CenterCrop", "ConvertImageDtype", "Grayscale", "Normalize", "PILToTensor", "Pad", "Resize", "ToDtype"),
        *("ToImage", "ToTensor", "LongestMaxSize", "PadIfNeeded", "SmallestMaxSize", "ToTensorV2"),
    )
)

# An evaluation that keeps more than its metric needs.
LOGITS_KEPT = "logits_kept"

# What goes on in all lines of a function that one of them calls so.
OF_FUNCTIONS = ("constants_anew",)

_PYTORCH = "https://docs.pytorch.org/docs/stable/"
_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"

_DECOMPOSES = (
    r"\blinalg\.(eigh|eigvalsh|eig|eigvals|svd|svdvals|qr|pinv|inv|matrix_exp|lstsq)\("
    r"|\btorch\.(svd|pinverse|inverse|matrix_exp)\(|\.(inverse|pinverse|svd|matrix_exp)\("
)

_STATE = "(h|hx|cx|c|hidden|state|cell)"

IDIOMS: tuple[Idiom, ...] = (
    # Samples: files and archives.
    Idiom(
        "zip_opened",
        "opens an archive for every sample, and reads its table of contents",
        "open the archive once in each process: at the first `__getitem__`, kept in an attribute of the data set",
        "https://docs.python.org/3/library/zipfile.html#zipfile.ZipFile",
        DATA,
        source=r"\b(ZipFile|TarFile|tarfile\.open|zipfile\.Path)\(",
        frames=r"_RealGetContents|_EndRecData|((Zip|Tar)File\.)?__init__ \(.*(zipfile|tarfile)",
    ),
    Idiom(
        "npz_member",
        "reads and unpacks a whole array of an `.npz` file each time that it is named",
        "read the array out of it once, in `__init__`; or save it as `.npy`, opened by `np.load(path, mmap_mode='r')`",
        "https://numpy.org/doc/stable/reference/generated/numpy.load.html",
        DATA,
        around=r"NpzFile\.__getitem__|__getitem__ \([^;]*npyio",
    ),
    Idiom(
        "hdf5_opened",
        "opens an HDF5 file, or a data set in it, for every sample",
        "open the file, and look up its data sets and attributes, once in each process: at the first `__getitem__`,"
        " kept in attributes of the data set",
        "https://docs.h5py.org/en/stable/high/file.html",
        DATA,
        source=r"\bh5py\.File\(",
        frames=r"(make_fid|__init__) \(h5py[/\\]|h5py[/\\]_hl[/\\](files|group|attrs)",
    ),
    Idiom(
        "hdf5_rows",
        "reads rows of an HDF5 file one by one, each from a chunk that is unpacked for it",
        "read a slice (`data[a:b]`), not a list of indices, and what lies in one chunk together; write the file with"
        " chunks of a sample's size, or keep in memory what fits",
        "https://docs.h5py.org/en/stable/high/dataset.html#chunked-storage",
        DATA,
        frames=r"h5py[/\\]_hl[/\\]dataset",
    ),
    Idiom(
        "zarr_rows",
        "reads a chunk of a zarr array for every sample",
        "write the array with chunks of a sample's size, or keep the last chunk and draw samples chunk by chunk",
        "https://zarr.readthedocs.io/en/stable/user-guide/performance/",
        DATA,
        frames=r"[/\\]?zarr[/\\]",
    ),
    Idiom(
        "unpacked",
        "unpacks compressed data for every sample",
        "keep what is unpacked (the last chunk, or all of it where memory allows), or store it unpacked",
        "https://docs.python.org/3/library/zlib.html",
        DATA,
        source=r"\b(zlib|gzip|bz2|lzma|zstd|zstandard|lz4|blosc2?|snappy)\b.*\b(decompress|open|loads?)\w*\(",
        frames=r"(gzip|bz2|lzma|_compression|zipfile|tarfile)\.py|zipfile[/\\]",
    ),
    Idiom(
        "npz_loaded",
        "loads an array from a file for every sample",
        "one array for many samples, opened once with `np.load(path, mmap_mode='r')`, and indexed",
        "https://numpy.org/doc/stable/reference/generated/numpy.load.html",
        DATA,
        source=r"\b(np|numpy)\.(load|loadtxt|genfromtxt)\(",
        frames=r"(load|loadtxt|genfromtxt) \(numpy[/\\]lib",
    ),
    Idiom(
        "torch_loaded",
        "unpickles a file for every sample",
        "store many samples as one tensor, and open it once with `torch.load(path, mmap=True)`",
        _PYTORCH + "generated/torch.load.html",
        DATA,
        source=r"\b(torch\.load|pickle\.loads?|joblib\.load)\(",
        frames=r"load \(torch[/\\]serialization",
    ),
    Idiom(
        "csv_parsed",
        "parses a text file for every sample",
        "parse it once, in `__init__` or before training, and keep the arrays",
        "https://pandas.pydata.org/docs/user_guide/io.html",
        DATA,
        source=r"\.read_(csv|json|excel|parquet|feather|table)\(",
        frames=r"pandas[/\\]io[/\\]",
    ),
    Idiom(
        "json_parsed",
        "parses JSON for every sample",
        "parse it once, before training, and keep what is used of it as arrays",
        "https://docs.python.org/3/library/json.html",
        DATA,
        source=r"\b(json|orjson|ujson|yaml)\.\w*load\w*\(",
        frames=r"(json|yaml)[/\\]\w+\.py",
    ),
    Idiom(
        "numbers_parsed",
        "makes numbers of text for every sample",
        "parse it once, where the file is read or before training, and keep the numbers as one array",
        "https://numpy.org/doc/stable/user/basics.io.html",
        DATA,
        source=r"\bliteral_eval\(|(?<![\w.])eval\(|\bfromstring\(|\b(float|int)\((\w+)\) for \2 in .*split\("
        r"|\bmap\((float|int), .*split\(",
        frames=r"literal_eval \(|[/\\]ast\.py",
    ),
    # Samples: tables and records.
    Idiom(
        "table_searched",
        "searches the whole table for the rows of one key",
        "group it by that column once, in `__init__`, and look the key up (`rows = dict(list(frame.groupby(column)))`)",
        "https://pandas.pydata.org/docs/user_guide/groupby.html",
        (*DATA, *START, *START_WORKER, *LOOP),
        source=r"(\b\w+)[\w.]*\[\s*\1[\w.]*(\[[\"'][^\]]*\]|\.\w+)\s*(==|\.eq\(|\.isin\()|\.query\(f?[\"']",
    ),
    Idiom(
        "dates_made",
        "makes dates, and what is computed of them, anew for every sample",
        "compute it once for the whole table, in `__init__`, and take each sample's rows of that",
        "https://pandas.pydata.org/docs/user_guide/timeseries.html#time-date-components",
        DATA,
        source=r"\b(date|period|timedelta)_range\(|\b(Datetime|Period)Index\(|\.dt\.\w+",
        frames=r"pandas[/\\]core[/\\](arrays|indexes)[/\\](datetime|period|timedelta|accessors)",
    ),
    Idiom(
        "table_sliced",
        "takes rows or slices out of a DataFrame, one after the other",
        "make an array of the columns once (`frame[columns].to_numpy()`), and index that; windows of it are"
        " `np.lib.stride_tricks.sliding_window_view`",
        "https://numpy.org/doc/stable/reference/generated/numpy.lib.stride_tricks.sliding_window_view.html",
        (*START, *START_WORKER),
        source=r"\.(iloc|loc|iat|at)\[|\.(iterrows|itertuples)\(",
    ),
    Idiom(
        "dataframe_rows",
        "takes a row out of a DataFrame for every sample",
        "make an array of the columns once (`frame.to_numpy()` in `__init__`), and index that",
        "https://pandas.pydata.org/docs/user_guide/enhancingperf.html",
        DATA,
        source=r"\.(iloc|loc|iat|at)\[|\.(iterrows|itertuples)\(",
        frames=r"pandas[/\\]core[/\\](indexing|frame|series|generic|internals)",
    ),
    Idiom(
        "pandas_by_sample",
        "computes with pandas for every sample",
        "compute it once for the whole table, in `__init__`, and take each sample's part of that as an array",
        "https://pandas.pydata.org/docs/user_guide/enhancingperf.html",
        DATA,
        frames=r"pandas[/\\]core[/\\]",
    ),
    Idiom(
        "nested_records",
        "builds tensors from nested lists of numbers: `datasets` does not know the shape of what a `map` has written",
        "give the `map` the shapes of the arrays that it writes: `features=Features({…, name: Array3D((3, 64, 64),"
        " 'float32')})`; or keep what was there before, and convert each batch in `with_transform`",
        "https://huggingface.co/docs/datasets/about_dataset_features",
        DATA,
        around=r"\b_recursive_tensorize\b.*\b_recursive_tensorize\b",
        at=("map",),
    ),
    Idiom(
        "records_of_datasets",
        "converts a record of a `datasets.Dataset` to Python objects for every sample",
        '`dataset.set_format("torch", columns=[…])` once, and take a batch with one index',
        "https://huggingface.co/docs/datasets/use_with_pytorch",
        DATA,
        frames=r"datasets[/\\](formatting|arrow_dataset|table)",
    ),
    Idiom(
        "manager_of_processes",
        "asks another process for every value (a dictionary or list of `multiprocessing.Manager`)",
        "keep it in the data set itself: as an array or a tensor, whose memory the workers share",
        _PYTORCH + "notes/multiprocessing.html",
        DATA,
        frames=r"multiprocessing[/\\](managers|connection)\.py",
        source=r"\bManager\(\)\.(dict|list)\(",
    ),
    Idiom(
        "rows_of_tensors",
        "takes single rows out of tensors, and puts them together again",
        "take a batch with one index: `DataLoader(data, sampler=BatchSampler(RandomSampler(data), batch_size, False),"
        " batch_size=None)`",
        _PYTORCH + "data.html#disable-automatic-batching",
        DATA,
        frames=r"^(?!ConcatDataset|Subset|ChainDataset).*torch[/\\]utils[/\\]data[/\\]dataset\.py",
    ),
    Idiom(
        "rows_by_index",
        "takes single rows, which are put together again",
        "take a batch with one index: `DataLoader(data, sampler=BatchSampler(the sampler, batch_size, False),"
        " batch_size=None)`; a sampler of tensors should yield numbers (`.tolist()`), which index faster",
        _PYTORCH + "data.html#disable-automatic-batching",
        DATA,
        source=r"^return \(?(self\.\w+\[(\w+)\])(, self\.\w+\[\2\])+\)?$"
        # By any arithmetic on a row, which calls nothing with arguments.
        r"|^(?!(for|if|elif|while|with)\b)(?!.*\w\((?!\))).*\bself(\.\w+)+\[\w+\](\.\w+\(\)| ?[-+*/]|,$)",
        last=True,
    ),
    Idiom(
        "waits_by_sleeping",
        "sleeps",
        "take the `sleep` out, or wait for what it waits for",
        "https://docs.python.org/3/library/time.html#time.sleep",
        (*DATA, *LOOP, *START, *START_WORKER),
        source=r"\b(time\.)?sleep\(",
        first=False,  # workers sleep side by side, as they wait for storage
    ),
    Idiom(
        "waits_for_a_lock",
        "waits for a lock that another thread or process holds",
        "give each worker its own object (a file, a connection, a cache), so that none waits for another",
        "https://docs.python.org/3/library/threading.html#lock-objects",
        (*DATA, *LOOP, *START),
        source=r"\bwith \w*(\.\w*)*[lL]ock\w*\b|\.acquire\(",
    ),
    Idiom(
        "random_access_by_network",
        "asks a server for every sample",
        "copy the data to the machine's own disk before training, or read shards of many samples in turn (webdataset)",
        "https://github.com/webdataset/webdataset",
        DATA,
        source=r"\b(requests|urllib|boto3|s3fs|fsspec|httpx)\b|\burlopen\(",
        frames=r"(urllib3?|requests|botocore|s3fs|fsspec|httpx|http)[/\\]\w+",
        first=False,
    ),
    Idiom(
        "database_queried",
        "asks a database for every sample",
        "an index on the column that is looked up (`CREATE INDEX`), and the rows of a batch with one query; or read the"
        " table once into arrays",
        "https://www.sqlite.org/queryplanner.html",
        DATA,
        source=r"\.(execute|executemany|fetchone|fetchall|fetchmany)\(",
        frames=r"(sqlite3|psycopg2?|sqlalchemy|pymysql|lmdb|redis|pymongo|duckdb)[/\\.]",
    ),
    Idiom(
        "program_started",
        "starts a program for every sample",
        "run it once, before training, and store what it makes",
        "https://docs.python.org/3/library/subprocess.html",
        DATA,
        source=r"\b(subprocess\.\w+|os\.(system|popen))\(",
        frames=r"[/\\]subprocess\.py",
    ),
    Idiom(
        "program_in_step",
        "starts a program in every step",
        "ask in Python (`psutil`, `torch.cuda.memory_stats`), in the steps that are shown",
        "https://psutil.readthedocs.io/en/latest/",
        LOOP,
        source=r"\b(subprocess\.\w+|os\.(system|popen))\(",
        frames=r"[/\\]subprocess\.py",
    ),
    Idiom(
        "folders_listed_again",
        "lists a folder for every sample",
        "list it once, in `__init__`",
        "https://docs.python.org/3/library/os.html#os.scandir",
        DATA,
        source=r"\b(os\.listdir|os\.walk|scandir|r?glob|iterdir)\(",
        frames=r"(walk|_iterdir|glob\w*|iterdir) \(",
    ),
    Idiom(
        "list_searched",
        "searches a list for every sample",
        "make a dictionary from value to place once (`{v: i for i, v in enumerate(values)}`), or a set",
        "https://wiki.python.org/moin/TimeComplexity",
        (*DATA, *LOOP, *START),
        source=r"\.index\(|\bif \w+ (not )?in (list\(|self\.\w*(list|names|paths|ids|words)\b)",
    ),
    Idiom(
        "array_scanned",
        "compares all of an array to find the rows of one value",
        "find them once for all values: a dictionary from value to rows, made in `__init__`"
        " (`np.argsort` and `np.searchsorted`, or `pandas` `groupby(…).indices`)",
        "https://numpy.org/doc/stable/reference/generated/numpy.searchsorted.html",
        (*DATA, "rest", *START),
        source=r"\b(where|nonzero|flatnonzero|argwhere)\([^,]* == [^,]*\)|\([^()]* == [^()]*\)\.(nonzero|argwhere)\(",
    ),
    Idiom(
        "rows_of_each",
        "picks the rows of one expert or class at a time, and waits until it is known how many they are",
        "compute all experts at once, with the rows ordered once (`argsort`, `bincount`):"
        " `torch.nn.functional.grouped_mm`, or stacked weights and `torch.bmm` over rows that are padded to a fixed"
        " number for each",
        _PYTORCH + "generated/torch.nn.functional.grouped_mm.html",
        ("forward",),
        source=r"\b(where|nonzero)\([^,()]* == [^,()]*\)|\([^,()]* == [^,()]*\)\.nonzero\(",
        loops=True,
    ),
    Idiom(
        "drawn_one_by_one",
        "draws single items from a collection (of a deque, each draw walks through it)",
        "keep what is drawn from in one array or tensor per field, written in turn, and draw all indices at once:"
        " `torch.randint(len(self), (batch,))`; at least a list in the deque's place",
        "https://docs.python.org/3/library/collections.html#collections.deque",
        ("rest", *DATA),
        source=r"(?<!np\.)(?<!numpy\.)\brandom\.(sample|choice)\(",
    ),
    Idiom(
        "constants_anew",
        "makes positions, masks or other constants",
        "where these do not depend on the batch: make them once, in `__init__`: `self.register_buffer(name, value,"
        " persistent=False)`, by size in a dictionary where sizes vary",
        _PYTORCH + "generated/torch.nn.Module.html#torch.nn.Module.register_buffer",
        ("forward",),
        source=r"\b(arange|linspace|meshgrid|tril|triu|eye|ones|full)\(|\b(\w+)\.sin\(\).*\b\2\.cos\(\)"
        r"|\bsin\((\w+)\).*\bcos\(\3\)",
        unless=r"torch/nn/(modules/(?!module)|functional)",
        only=r"(?!.*(mm|bmm|conv\w*|linear|matmul|embedding\w*|attention\w*|layer_norm|batch_norm)$)",
    ),
    Idiom(
        "pairs_expanded",
        "takes differences, and sums their squares",
        "a product of matrices, where these are of all pairs: `x.square().sum(-1)[:, :, None] +"
        " y.square().sum(-1)[:, None] - 2 * x @ y.mT`, or `torch.cdist(x, y)`",
        _PYTORCH + "generated/torch.cdist.html",
        ("forward", "rest"),
        source=r"(unsqueeze|expand|None).*[\])] - |\bpow\(\w+ - \w+, 2\)\.sum\("
        r"|\(\w+ - \w+\)\.(pow\(2\)|square\(\))\.sum\(",
    ),
    Idiom(
        "log_determinant",
        "decomposes a matrix for the logarithm of its determinant",
        "a Cholesky decomposition, of a symmetric, positive matrix: `2 * torch.linalg.cholesky(a).diagonal(dim1=-2,"
        " dim2=-1).log().sum(-1)`; of others `torch.linalg.slogdet(a)`",
        _PYTORCH + "generated/torch.linalg.cholesky.html",
        ("forward", "rest"),
        source=r"\b(eigvalsh|eigvals|svdvals)\(.*\.log\w*\(|\.log\w*\(.*\b(eigvalsh|eigvals|svdvals)\(",
    ),
    Idiom(
        "decomposition",
        "decomposes a matrix in every step",
        "a cheaper decomposition: for a spectral norm `torch.nn.utils.parametrizations.spectral_norm`, to solve"
        " `torch.linalg.solve(a, b)`, of a positive matrix `torch.cholesky_solve`; a few of the largest vectors:"
        " `torch.svd_lowrank`; else every k steps",
        _PYTORCH + "generated/torch.svd_lowrank.html",
        ("forward",),
        source=_DECOMPOSES,
    ),
    Idiom(
        "decomposition_between",
        "decomposes a matrix in every step",
        "where it is only watched or logged, in the steps that keep it: ask `step % k` before it is computed; else a"
        " cheaper one: `torch.svd_lowrank` for a few of the largest, the Gram matrix of the shorter side for all",
        _PYTORCH + "generated/torch.svd_lowrank.html",
        ("rest",),
        source=_DECOMPOSES,
    ),
    Idiom(
        "samples_decomposed",
        "decomposes a matrix for every sample",
        "where it does not change from epoch to epoch, compute it once for each sample, before training (in PyG as a"
        " `pre_transform`), or keep what was computed by the sample's index",
        "https://pytorch-geometric.readthedocs.io/en/latest/tutorial/create_dataset.html",
        DATA,
        source=r"\blinalg\.(eigh|eigvalsh|eig|eigvals|svd|svdvals|qr|pinv|inv|matrix_exp|lstsq)\("
        r"|\btorch\.(svd|pinverse|inverse|matrix_exp)\(|\bsparse\.linalg\.\w+\(",
    ),
    Idiom(
        "graph_kept",
        "keeps the graph, and walks all that it has kept again",
        "call `backward()` on each part's own loss, without `retain_graph=True`, and sum `loss.detach()`: the gradients"
        " add up; a state that is carried from step to step: `state.detach()`",
        _PYTORCH + "generated/torch.Tensor.backward.html",
        ("backward", "rest"),
        source=r"retain_graph=True",
    ),
    Idiom(
        "read_from_the_top",
        "reads a file from its beginning to one place for every sample",
        "note once where each line begins (`file.tell()`), and go there (`file.seek(offset)`), or keep the lines in"
        " memory, or in one array with `mmap_mode='r'`",
        "https://docs.python.org/3/library/io.html#io.IOBase.seek",
        DATA,
        source=r"\bislice\(\w*(file|f|handle|lines|reader)\b|\blinecache\.|enumerate\((file|f|handle|open\(.*)\)|\.readlines\(\)\[",
    ),
    Idiom(
        "drawn_without_repetition",
        "draws without repetition, or what is not in a set, from many: each time all of them are copied",
        "`rng.choice(n, k, replace=False)` of `rng = np.random.default_rng()`, which copies none; of what is not in a"
        " set: draw all at once with repetition (`rng.integers(n, size=k)`), and those again that are not allowed"
        " (`np.searchsorted`, `np.isin`)",
        "https://numpy.org/doc/stable/reference/random/generated/numpy.random.Generator.integers.html",
        ("rest", *DATA, *START),
        source=r"\bchoice\(.*replace=False|\bsetdiff1d\(|\blist\(.* - set\(|\bset\(range\(",
    ),
    Idiom(
        "weights_drawn",
        "draws the first weights of a model",
        "where they are loaded afterwards: make the model under `torch.device('meta')`, and"
        " `load_state_dict(torch.load(path, mmap=True), assign=True)`; of transformers, `from_pretrained`",
        "https://docs.pytorch.org/tutorials/recipes/recipes/module_load_state_dict_tips.html",
        START,
        frames=r"torch[/\\]nn[/\\]init\.py",
    ),
    Idiom(
        "array_grown",
        "makes an array longer, and copies all of it each time",
        "collect the parts in a list, and join them once at the end",
        "https://numpy.org/doc/stable/reference/generated/numpy.append.html",
        (*DATA, "rest", *START),
        source=r"\b(np|numpy)\.(append|insert)\("
        r"|(?P<grown>[\w.]+) = (np\.concatenate|np\.[vh]stack|torch\.cat|pd\.concat)\([\[(](?P=grown),",
    ),
    Idiom(
        "dates_parsed",
        "parses dates for every sample",
        "parse them once, before training (`pd.to_datetime` of the whole column), and keep the numbers",
        "https://pandas.pydata.org/docs/reference/api/pandas.to_datetime.html",
        (*DATA, *START),
        source=r"\bstrptime\(|\bto_datetime\(|\bfromisoformat\(|dateutil|\bparser\.parse\(",
        frames=r"_?strptime\.py|dateutil[/\\]",
    ),
    Idiom(
        "checksums",
        "computes checksums",
        "check files once, when they are fetched",
        "https://docs.python.org/3/library/hashlib.html",
        (*DATA, *START),
        source=r"\b(hashlib|zlib\.crc32|md5|sha\d+)\b",
    ),
    Idiom(
        "drawn_with_weights",
        "draws by weights from all samples, one at a time",
        "draw many at once: `rng.choice(n, size=k, p=p)`, `torch.multinomial`, or in a loader `WeightedRandomSampler`;"
        " of weights that change, by a sum tree",
        _PYTORCH + "data.html#torch.utils.data.WeightedRandomSampler",
        (*DATA, "rest"),
        source=r"\brandom\.choices\(|\brandom\.choice\(.*\bp=|\.choice\(.*\bp=",
        frames=r"choices \(.*random\.py",
    ),
    Idiom(
        "spectra",
        "computes a spectrum, or changes the rate of a sound",
        "do it once, before training, or for the batch on the device (`torchaudio.transforms`, whose object keeps its"
        " window and filters)",
        "https://docs.pytorch.org/audio/stable/transforms.html",
        DATA,
        source=r"\b(stft|istft|mfcc|melspectrogram|[Ss]pectrogram|[Mm]el_?[Ss]cale|[Rr]esample)\w*\(|\bfft\.\w+\(",
    ),
    Idiom(
        "nested_data_sets",
        "goes through data sets that are nested in each other",
        "one `ConcatDataset(parts)` of all parts, not `a + b + c + …`, which nests one in the other; the same holds of"
        " `Subset` of `Subset`",
        _PYTORCH + "data.html#torch.utils.data.ConcatDataset",
        (*DATA, *START),
        frames=r"^(ConcatDataset|Subset|ChainDataset)\.",
    ),
    Idiom(
        "kept_by_a_worker",
        "keeps what it makes in the memory of one worker",
        "`persistent_workers=True`, so that it outlives the epoch; or make it once, before the loader, so that all"
        " workers have it",
        _PYTORCH + "data.html#torch.utils.data.DataLoader",
        ("worker",),
        source=r"\bself\.\w*(cache|memo|kept|stored?|loaded)\w*\[[^\]]+\] *=",
    ),
    Idiom(
        "loader_counted",
        "goes through all batches to count them",
        "`len(loader)`, or `len(data)`, which reads nothing",
        _PYTORCH + "data.html#torch.utils.data.DataLoader",
        (*DATA, *LOOP, *START),
        source=r"\blen\(list\(|\bsum\(1 for ",
    ),
    Idiom(
        "whole_column",
        "converts a whole column or array for a part of it",
        "take the row first, then the column (`data[n]['x']`, not `data['x'][n]`), or convert it once in `__init__`",
        "https://huggingface.co/docs/datasets/access",
        DATA,
        source=r"\.to_(pandas|pylist|numpy|list|dict)\(\)(\.\w+)*\[|\.tolist\(\)\[|return [^(]*\.tolist\(\)$",
        frames=r"pyarrow[/\\]",
    ),
    Idiom(
        "graphs_built",
        "builds a graph or a molecule for every sample",
        "build it once, before training, and store its arrays",
        "https://pytorch-geometric.readthedocs.io/en/latest/tutorial/create_dataset.html",
        DATA,
        source=r"\b(nx|networkx|Chem|rdkit)\.|\bMolFrom\w+\(|\bfrom_(networkx|smiles)\(",
        frames=r"(networkx|rdkit)[/\\]",
    ),
    # Samples: pictures, sound, text.
    Idiom(
        "filtered_at_full_size",
        "filters a picture",
        "make the picture small first, and then filter it, with a radius as much smaller",
        "https://pillow.readthedocs.io/en/stable/reference/ImageFilter.html",
        DATA,
        source=r"\.filter\(|\b(GaussianBlur|gaussian_blur|medianBlur|bilateralFilter|Sharpness)\b",
        frames=r"PIL[/\\]ImageFilter",
    ),
    Idiom(
        "colours_at_full_size",
        "changes the colours of a picture",
        "crop or resize first, and then change the colours",
        "https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations",
        DATA,
        frames=r"adjust_(hue|saturation|contrast|brightness)|PIL[/\\]ImageEnhance",
        source=r"\bColorJitter\b|ImageEnhance",
        first=False,
    ),
    Idiom(
        "picture_decoded",
        "decodes a picture",
        "decode only what is used: choose the frames of a clip before they are decoded, store pictures about as large"
        " as they are used, or call `image.draft('RGB', size)` before a JPEG is loaded, which decodes a fraction of it",
        "https://pillow.readthedocs.io/en/stable/reference/Image.html#PIL.Image.Image.draft",
        DATA,
        source=r"\bImage\.open\(|\bimread\(|\bimdecode\(|\bdecode_(jpeg|image|png)\(|\.convert\(",
        frames=r"(load|load_prepare|open) \(PIL[/\\]|imread|decode_(jpeg|image)",
        first=False,
    ),
    Idiom(
        "picture_resized",
        "makes a picture smaller",
        "store the pictures at about the size that is used",
        "https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations",
        DATA,
        source=r"\.(resize|thumbnail)\(|\b(Resize|RandomResizedCrop)\b",
        frames=r"resize \((PIL|torchvision|cv2)[/\\]",
        first=False,
    ),
    Idiom(
        "picture_to_tensor",
        "converts pictures to floating point in the loader",
        "hand over `uint8` (`pil_to_tensor`, and no division), and convert the batch on the device",
        "https://docs.pytorch.org/vision/stable/transforms.html#performance-considerations",
        DATA,
        frames=r"to_tensor \(torchvision",
        source=r"\b(ToTensor|to_tensor)\(",
        first=False,
    ),
    Idiom(
        CROPPED_LATE,
        "changes whole pictures, of which a part is then cut out or made smaller",
        "crop, or make the pictures smaller, first of all: what comes then works on fewer pixels",
        "https://albumentations.ai/docs/3-basic-usage/performance-tuning/",
        DATA,
        at=CROPS,
    ),
    Idiom(
        SAME_PICTURES,
        "makes the same tensor of a picture in every epoch: none of its transforms draws a number",
        "make the tensors once, before training, keep them as one where memory allows, and take a batch of it with one"
        " index (`__getitems__`, or a `BatchSampler` as the sampler and `batch_size=None`)",
        _PYTORCH + "data.html#disable-automatic-batching",
        DATA,
    ),
    Idiom(
        "volumes_prepared",
        "loads volumes and resamples them again for every sample",
        "`monai.data.CacheDataset` instead of `Dataset` (`PersistentDataset` keeps them on disk): what comes before the"
        " first random transform is then done once for each volume",
        "https://docs.monai.io/en/stable/data.html#cachedataset",
        DATA,
        around=r"\b(LoadImage|Spacing|SpatialResample|Orientation|Resize)d?\.__call__ \([^;]*monai[/\\]",
        at=("Dataset",),
    ),
    Idiom(
        "augmented",
        "augments pictures one by one",
        "augment the batch on the device (`torchvision.transforms.v2`, kornia), or with more workers",
        "https://docs.pytorch.org/vision/stable/transforms.html",
        DATA,
        frames=r"(torchvision[/\\]transforms|albumentations|kornia|monai[/\\]transforms|imgaug)[/\\]",
        first=False,
    ),
    Idiom(
        "sound_decoded",
        "decodes or resamples sound",
        "read only what is used of it (setpos and readframes(n), frame_offset and num_frames, offset and duration);"
        " resample once, before training, and store what is used",
        "https://docs.pytorch.org/audio/stable/index.html",
        DATA,
        source=r"\.readframes\(|\b(librosa|torchaudio)\.load\(|\b(sf|soundfile)\.read\(|\bwavfile\.read\(",
        frames=r"(librosa|torchaudio|soundfile|audioread|resampy)[/\\.]",
        first=False,
    ),
    Idiom(
        "video_decoded",
        "decodes video",
        "store clips of the length and size that are used, or decode on the GPU (torchcodec)",
        "https://github.com/meta-pytorch/torchcodec",
        DATA,
        frames=r"(decord|torchcodec|av|torchvision[/\\]io)[/\\.]",
        source=r"\bVideo(Reader|Decoder|Capture)\(",
        first=False,
    ),
    Idiom(
        "tokenised",
        "tokenises texts",
        "tokenise once, before training (`dataset.map(tokenize, batched=True)`), and keep the numbers",
        "https://huggingface.co/docs/datasets/process#map",
        (*DATA, "rest", *START),
        source=r"\b(tokeni[sz]er?|tokeni[sz]e|encode_plus|batch_encode_plus|word_tokenize)\w*\("
        r"|\b(\w*(tok|bpe|vocab)\w*|enc|encoding|spm?|sp_model)\.encode\(",
        # It calls no operator but those that make a tensor of what comes out.
        only=r"aten::(detach|lift_fresh|_to_copy|to|empty|copy_)",
        frames=r"(tokenization_\w+|tokenizers?[/\\]|nltk[/\\]|spacy[/\\]|sentencepiece|tiktoken)",
    ),
    Idiom(
        "regular_expressions",
        "matches regular expressions",
        "do it once, before training, and keep the result",
        "https://docs.python.org/3/library/re.html",
        (*DATA, "rest", *START),
        source=r"\bre\.\w+\(|\.(findall|finditer|fullmatch)\(",
        frames=r"[/\\]re([/\\]\w+)?\.py|regex[/\\]",
    ),
    Idiom(
        "padded_in_collate",
        "pads texts while a batch is put together",
        "pad to the longest of the batch, and draw texts of like lengths together",
        "https://huggingface.co/docs/transformers/main_classes/data_collator",
        DATA,
        # Pictures are padded, too: by their mode, or on both sides of two dimensions.
        source=r"\bpad_sequence\(|\.pad\((?!.*\bmode=|\w+, [(\[]([^,()]+, ){3})",
        first=False,
    ),
    Idiom(
        "scipy_filters",
        "filters or interpolates with SciPy",
        "do it on the device, for the batch, or once before training",
        "https://docs.scipy.org/doc/scipy/reference/ndimage.html",
        DATA,
        frames=r"scipy[/\\](ndimage|signal|interpolate)",
        first=False,
    ),
    Idiom(
        "deep_copies",
        "copies objects of Python",
        "copy only what is changed (`tensor.clone()`, `dict(row)`), or nothing",
        "https://docs.python.org/3/library/copy.html",
        (*DATA, *LOOP, *START),
        source=r"\b(copy\.)?deepcopy\(",
        frames=r"deepcopy \(|[/\\]copy\.py",
    ),
    Idiom(
        "whole_order",
        "makes a list of all indices, of which the job may use few",
        "draw indices as they are needed (`RandomSampler(data, num_samples=…)`), or keep the order as a tensor:"
        " `torch.randperm(n)` without `tolist()`",
        _PYTORCH + "data.html#torch.utils.data.RandomSampler",
        (*DATA, "rest", *START),
        source=r"\blist\(range\(|\brandom\.shuffle\(|\brandperm\(.*tolist\(",
        frames=r"__iter__ \(torch[/\\]utils[/\\]data[/\\](sampler|distributed)\.py",
    ),
    Idiom(
        "made_then_filtered",
        "makes samples of which a filter behind it then drops some",
        "filter first, where what decides is known before (a length in the list of files, a label), and make only what"
        " is kept; else make it once, before training",
        "https://docs.python.org/3/howto/functional.html#generators",
        DATA,
    ),
    Idiom(
        "drawn_by_numpy",
        "draws random numbers for every sample",
        "draw them for the batch, on the device",
        _PYTORCH + "generated/torch.rand.html",
        DATA,
        source=r"\b(np|numpy)\.random\.",
        first=False,
    ),
    Idiom(
        "list_of_arrays",
        "makes a tensor of a list, number by number or array by array",
        "`torch.from_numpy(np.array(rows))`; or an array that is indexed with all indices at once",
        _PYTORCH + "generated/torch.tensor.html",
        (*DATA, "rest", *START),
        source=r"\btorch\.(tensor|FloatTensor|LongTensor|as_tensor|Tensor)\((?!.*\.(to_numpy|numpy|values)\b)"
        r"(?!\[?[-+\d.,e ]+\])",  # a few constants
    ),
    # The start.
    Idiom(
        "lock_of_a_fork",
        "waits for a lock: one that another thread held when the worker was forked is never released in it",
        "take no lock in a worker that the parent may hold (make it at the first sample, or start the thread after the"
        " loader), or `multiprocessing_context='spawn'`",
        "https://docs.python.org/3/library/os.html#os.fork",
        START_WORKER,
        source=r"\bwith \w*(\.\w*)*[lL]ock\w*\b|\.acquire\(",
    ),
    Idiom(
        "imported",
        "imports modules",
        "import only what is used, and late: inside the function that needs it",
        "https://docs.python.org/3/using/cmdline.html#cmdoption-X",
        START,
        source=r"^(import|from) ",
    ),
    Idiom(
        "folders_listed",
        "goes through folders of files",
        "list them once, and keep the list in a file beside the data",
        "https://docs.pytorch.org/vision/stable/generated/torchvision.datasets.DatasetFolder.html",
        START,
        source=r"\b(os\.walk|os\.listdir|scandir|r?glob|iterdir|ImageFolder|DatasetFolder)\(",
        frames=r"(make_dataset|find_classes|walk|_iterdir|glob\w*) \(",
    ),
    Idiom(
        "text_read",
        "parses text",
        "parse it once, and keep the arrays in a file (`np.save`, Parquet), which the next start opens",
        "https://pandas.pydata.org/docs/user_guide/io.html",
        START,
        source=r"\.read_(csv|json|excel)\(|\bjson\.loads?\(|\b(np|numpy)\.(loadtxt|genfromtxt)\(|\bcsv\.\w*reader\(",
        frames=r"(json|csv|yaml)[/\\]?\w*\.py|pandas[/\\]io[/\\]",
    ),
    Idiom(
        "downloaded",
        "reads from a server",
        "fetch it once, before the job, to a disk that it reaches quickly",
        "https://huggingface.co/docs/huggingface_hub/guides/download",
        START,
        source=r"\b(requests|urllib|boto3|hf_hub_download|snapshot_download|urlopen|wget)\b",
        frames=r"(urllib3?|requests|botocore|httpx|http|huggingface_hub)[/\\]\w+",
    ),
    Idiom(
        "weights_loaded",
        "loads weights",
        "`torch.load(path, mmap=True)` or safetensors from a local disk, into a model that was made on"
        " `torch.device('meta')`",
        _PYTORCH + "generated/torch.load.html",
        START,
        source=r"\.from_pretrained\(|\btorch\.load\(|\bload_state_dict\(|\bload_file\(",
        first=False,
    ),
    Idiom(
        "weights_drawn",
        "draws random weights",
        "make the model on `torch.device('meta')` where a checkpoint is loaded into it, or on the GPU",
        _PYTORCH + "meta.html",
        START,
        frames=r"(reset_parameters|_init_weights|init_weights) \(|torch[/\\]nn[/\\]init\.py",
        first=False,
    ),
    # The loop: what stands between the phases.
    Idiom(
        "average_of_weights",
        "keeps an average of the weights, parameter by parameter",
        "one call for all parameters: `torch._foreach_lerp_(averages, weights, 1 - decay)`, or"
        " `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))`",
        _PYTORCH + "optim.html#weight-averaging-swa-and-ema",
        LOOP,
        source=r"\bfor .*\bstate_dict\(\)|\blerp_\(|\bmul_\(.*\)\.add_\(|\*= *(self\.)?\w*(decay|momentum|0?\.9\d*)\b",
        frames=r"(^|_)(ema|average)(_\w*)? \(|(\b|_)ema\w*\.py|swa_utils\.py|(_|\b)Ema\w*\.",
    ),
    Idiom(
        "recurrence_by_hand",
        "computes a recurrent layer step by step",
        "`nn.LSTM`, `nn.GRU` or `nn.RNN` over the whole sequence, in one call: the weights are the same",
        _PYTORCH + "generated/torch.nn.LSTM.html",
        LOOP,
        # A state that is made of a state: h = tanh(… h …).
        source=rf"\bweight_(ih|hh)|\b{_STATE}\w*(, \w+)* = (?=.*\b{_STATE}\w*\b(?!\()).*(tanh|sigmoid|[Cc]ell)\w*\(",
        often=30,
    ),
    Idiom(
        "histograms",
        "makes histograms or quantiles",
        "make them only in the steps that log them, every k-th, or of few parameters",
        "https://docs.wandb.ai/models/track/log/",
        LOOP,
        source=r"\b(histogram|histc|add_histogram|quantile|kthvalue|svdvals|matrix_rank)\(|\.median\(|wandb\.Histogram"
        r"|\.watch\(",
        frames=r"histogram",
    ),
    Idiom(
        "logged_to_a_service",
        "logs",
        "log every k-th step (`if step % 50 == 0`), with values that are read from the device together",
        "https://docs.wandb.ai/models/track/log/",
        LOOP,
        source=r"\b(wandb|mlflow|neptune|comet|writer|logger|tb)\.(log\w*|add_\w+)\(|\.add_(scalar|image|figure)s?\(",
        frames=r"(wandb|mlflow|neptune|comet_ml|tensorboard\w*|torch[/\\]utils[/\\]tensorboard)[/\\]",
    ),
    Idiom(
        "figures_of_forecasts",
        "draws figures of its predictions",
        "`log_interval=-1` where the model is made: none are drawn then; draw them after training, from what it"
        " predicts",
        "https://pytorch-forecasting.readthedocs.io/en/stable/api/pytorch_forecasting.models.base_model.BaseModel.html",
        LOOP,
        around=r"\(pytorch_forecasting[/\\].*matplotlib[/\\]",
        at=("log_interval",),
    ),
    Idiom(
        "figures_drawn",
        "draws figures",
        "draw them every k-th step, or after training, from what was kept",
        "https://matplotlib.org/stable/users/explain/performance.html",
        LOOP,
        source=r"\bplt\.|\.savefig\(",
        frames=r"matplotlib[/\\]|seaborn[/\\]|plotly[/\\]",
    ),
    Idiom(
        "metrics_of_all",
        "computes a metric of everything so far",
        "keep the metric's state instead of all outputs (sums, counts, bins: `thresholds=` of torchmetrics), and"
        " compute it once an epoch",
        "https://lightning.ai/docs/torchmetrics/stable/pages/overview.html",
        ("rest",),
        source=r"\btorch\.(cat|stack)\(\w*(all|scores?|preds?|outputs?|labels?|targets?|losses)\w*\)|\.compute\(\)",
        frames=r"torchmetrics[/\\]|sklearn[/\\]metrics",
    ),
    Idiom(
        "all_sorted",
        "sorts all values of each row",
        "`topk(k)` where the largest few are enough; the place of one value is the number of larger ones:"
        " `(scores > scores.gather(1, target[:, None])).sum(1)`",
        _PYTORCH + "generated/torch.topk.html",
        LOOP,
        source=r"\bargsort\(|\btorch\.sort\(|\.sort\((dim\b|-?\d|descending)",
    ),
    Idiom(
        "metrics_on_the_host",
        "computes metrics with NumPy or scikit-learn",
        "compute them with tensors, on the device (torchmetrics), and every k-th step",
        "https://lightning.ai/docs/torchmetrics/stable/",
        LOOP,
        source=r"\b\w*(roc_auc|f1|accuracy|precision|recall|confusion)\w*\(",
        frames=r"sklearn[/\\]|scipy[/\\]stats",
    ),
    Idiom(
        "nms_by_hand",
        "matches boxes or filters them in Python",
        "`torchvision.ops.batched_nms`, `box_iou`: for all boxes at once",
        "https://docs.pytorch.org/vision/stable/ops.html",
        LOOP,
        source=r"\b(iou|nms|box)\w*\(",
        first=False,
    ),
    Idiom(
        "values_read_one_by_one",
        "reads values of tensors one by one",
        "keep them as tensors, and read them together every k-th step (`torch.stack(values).tolist()`)",
        _TUNING + "#avoid-unnecessary-cpu-gpu-synchronization",
        LOOP,
        source=r"\.(item|tolist|cpu|numpy)\(\)|\bfloat\(\w*loss",
    ),
    Idiom(
        "gradients_checked",
        "looks at every gradient",
        "look at all at once: `torch.nn.utils.get_total_norm(grads)`, or `torch._foreach_norm(grads)`; every k-th step",
        _PYTORCH + "generated/torch.nn.utils.get_total_norm.html",
        LOOP,
        source=r"\.grad\b.*\.(norm|abs|max|mean|isnan|isfinite)\(|\bisnan\(|\bisfinite\(",
    ),
    Idiom(
        "printed",
        "prints",
        "print every k-th step",
        _TUNING,
        LOOP,
        source=r"^print\(|\btqdm\.write\(|\.set_(postfix|description)\(|\bpprint\(",
        frames=r"tqdm[/\\]|rich[/\\]",
    ),
    Idiom(
        "saved_compressed",
        "compresses what it writes",
        "write it uncompressed: the bits of weights hardly compress (`torch.save(state, path)`); where room is short,"
        " compress it after training, or with `compresslevel=1`",
        "https://docs.python.org/3/library/gzip.html#gzip.open",
        LOOP,
        around=r"write \(([^;]*[/\\])?(gzip|bz2|lzma)\.py",
        source=r"\b(gzip|bz2|lzma)\.open\(|\bsavez_compressed\(",
        first=False,
    ),
    Idiom(
        LOGITS_KEPT,
        "keeps the scores of all classes for the whole evaluation set, and puts them together for a metric",
        "hand on what the metric needs alone: `Trainer(…, preprocess_logits_for_metrics=lambda logits, labels:"
        " logits.argmax(-1))`, or `TrainingArguments(batch_eval_metrics=True)`",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
        LOOP,
        around=r"(nested_concat|nested_numpify|EvalLoopContainer\.\w+) \(transformers",
        at=("compute_metrics",),
    ),
    Idiom(
        "environments_in_processes",
        "waits for environments in processes of their own, with a message to each and one from it at every step",
        "step them in this process (`DummyVecEnv`, the default of `make_vec_env`; of gymnasium"
        " `vectorization_mode='sync'`), unless one step of one of them takes longer than a message",
        "https://stable-baselines3.readthedocs.io/en/master/guide/vec_envs.html",
        LOOP,
        around=r"(SubprocVecEnv|AsyncVectorEnv)\.\w+ \(",
        at=("vec_env_cls", "SubprocVecEnv", "AsyncVectorEnv", "vectorization_mode"),
    ),
    Idiom(
        "saved",
        "writes a file",
        "save every k-th step, in a thread (`torch.distributed.checkpoint.async_save`), or fewer bytes",
        "https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html",
        LOOP,
        source=r"\b(torch\.save|np\.save\w*|pickle\.dump|json\.dump|to_csv|save_pretrained)\(|\.write\(",
        frames=r"save \(torch[/\\]serialization|safetensors",
        first=False,
        at=("ModelCheckpoint", "save_steps", "save_strategy"),
    ),
    Idiom(
        "objects_walked",
        "walks all objects of the process",
        "do it every few hundred steps, or while a leak is looked for; the peak of the process's memory is"
        " `resource.getrusage(resource.RUSAGE_SELF).ru_maxrss`, the device's memory `torch.cuda.memory_allocated()`",
        "https://docs.python.org/3/library/gc.html#gc.get_objects",
        (*LOOP, *DATA),
        source=r"\bgc\.(get_objects|get_referrers|get_referents)\(|\b(muppy|objgraph|tracker)\.\w+\(|take_snapshot\(",
        frames=r"(objgraph|pympler[/\\]\w+)\.py",
    ),
    Idiom(
        "collected_by_hand",
        "collects garbage",
        "leave `gc.collect()` out: Python collects by itself",
        "https://docs.python.org/3/library/gc.html",
        LOOP,
        source=r"\bgc\.collect\(",
    ),
    Idiom(
        "cache_emptied",
        "empties the allocator's cache",
        "leave `empty_cache()` out: what is freed is used again without it",
        _PYTORCH + "notes/cuda.html#cuda-memory-management",
        LOOP,
        source=r"\bempty_cache\(",
    ),
    Idiom(
        "warned",
        "warns again and again",
        "cure what the warning says; or let each be said once: `torch.set_warn_always(False)`,"
        " `warnings.simplefilter('once')`",
        "https://docs.python.org/3/library/warnings.html",
        (*DATA, *LOOP),
        source=r"\bwarnings\.warn\(",
        frames=r"[/\\]warnings\.py|linecache\.py",
    ),
    Idiom(
        "logged_by_python",
        "writes a log, or the text for one",
        "log every k-th step; `logger.debug('%s', x)` makes the text only where the level asks for it, an f-string"
        " always",
        "https://docs.python.org/3/howto/logging.html#optimization",
        (*DATA, *LOOP),
        source=r"\b(log|logger|logging|_logger|LOG|self\.log(ger)?)\.(debug|info|warning|error|log)\(",
        frames=r"[/\\]logging[/\\]__init__\.py|loguru[/\\]|torch[/\\]_tensor_str\.py",
    ),
    Idiom(
        "profiled",
        "profiles",
        "leave the profiler out, or let it see a few steps: `schedule=torch.profiler.schedule(wait=10, warmup=2,"
        " active=3)`",
        _PYTORCH + "profiler.html#torch.profiler.schedule",
        LOOP,
        source=r"\bprofiler?\.profile\(|\bcProfile\b|\.(export_chrome_trace|key_averages)\(|\bsys\.set(trace|profile)\(",
        frames=r"torch[/\\]profiler[/\\]|^profile\.__\w+ \(|cProfile\.py|[/\\]pstats\.py",
    ),
    Idiom(
        "optimizer_made",
        "makes an optimizer",
        "make it once, before the loop: a new one forgets its state, too",
        _PYTORCH + "optim.html",
        LOOP,
        source=r"\boptim\.\w+\(\w*(model|net|params|parameters)",
        frames=r"add_param_group \(",
    ),
    Idiom(
        "mode_switched",
        "switches every module between training and evaluation",
        "once an epoch, around the validation",
        _PYTORCH + "generated/torch.nn.Module.html#torch.nn.Module.train",
        LOOP,
        source=r"^(?!\w*(trainer|algo)\b)\w+\.(train|eval)\(\)",
        frames=r"^Module\.(train|eval) \(",
    ),
    Idiom(
        "parameters_listed",
        "goes through all modules to list their parameters",
        "list them once, before the loop: `parameters = list(model.parameters())`",
        _PYTORCH + "generated/torch.nn.Module.html#torch.nn.Module.parameters",
        LOOP,
        frames=r"(named_parameters|named_modules|_named_members|named_buffers) \(.*torch[/\\]nn",
    ),
    Idiom(
        "schedules_by_hand",
        "steps a schedule of the learning rate in Python",
        "`LambdaLR` or `OneCycleLR`, stepped once an epoch, or an optimizer with few groups of parameters",
        _PYTORCH + "optim.html#how-to-adjust-learning-rate",
        LOOP,
        frames=r"torch[/\\]optim[/\\](lr_scheduler|swa_utils)\.py",
        first=False,
    ),
    Idiom(
        "games_played",
        "steps an environment",
        "step several environments at once (`gymnasium.make_vec`), in processes of their own",
        "https://gymnasium.farama.org/api/vector/",
        LOOP,
        source=r"\benvs?\.(step|reset)\(",
        frames=r"(gymnasium|gym|ale_py|pettingzoo|stable_baselines3)[/\\]",
        first=False,
    ),
    Idiom(
        "exchanged_one_by_one",
        "exchanges the gradients by hand, one parameter after the other, once the backward pass is over",
        "wrap the model in `DistributedDataParallel`: it exchanges them in buckets, while the backward pass goes on",
        _PYTORCH + "generated/torch.nn.parallel.DistributedDataParallel.html",
        LOOP,
        source=r"\ball_reduce\([\w.]*\bgrad\b",
    ),
    Idiom(
        "texts_scored",
        "scores texts on the host, a loop in Python over their letters or words",
        "score only the steps that are shown, and with a compiled library (`rapidfuzz`, `jiwer`, `sacrebleu`)",
        "https://rapidfuzz.github.io/RapidFuzz/Usage/distance/Levenshtein.html",
        LOOP,
        source=r"\b(edit_distance|levenshtein|word_error_rate|char_error_rate|wer|cer|bleu\w*|rouge\w*)\(",
        frames=r"(?i)\b\w*(edit_?distance|levenshtein|error_rate|bleu|rouge)\w* \(",
    ),
    Idiom(
        "gradients_one_by_one",
        "computes the gradients of one sample after the other",
        "compute those of all samples at once: `torch.func.vmap(torch.func.grad(loss_of_one), (None, 0, 0))`; the"
        " squared ones of a linear layer are the product of its squared inputs and squared output gradients",
        "https://docs.pytorch.org/tutorials/intermediate/per_sample_grads.html",
        LOOP,
        source=r"\bin .*\bautograd\.grad\(|\.split\(1\)",
    ),
    Idiom(
        JACOBIAN,
        "computes a Jacobian with a backward pass for each of its rows",
        "all rows at once: `torch.autograd.grad(y, x, rows, is_grads_batched=True)`, or"
        " `torch.func.vmap(torch.func.jacrev(f))(x)`; of one linear layer and its activation, the closed form of the"
        " weight and the derivative",
        _PYTORCH + "generated/torch.func.jacrev.html",
        LOOP,
        source=r"\bautograd\.grad\(\(?[\w.]+\[",
        beside=True,
    ),
    Idiom(
        "penalty_of_weights",
        "adds the squares of the weights to the loss, and computes gradients of that",
        "`weight_decay=` of the optimizer (twice the factor of the sum of squares): the same gradient with `SGD` and"
        " `Adam`, without a graph; `AdamW` decouples it",
        _PYTORCH + "generated/torch.optim.SGD.html",
        ("forward", "rest"),
        source=r"^(?!.*\.grad\b)(?=.*(\bfor \w+ in .*parameters\(|(\b\w+) (\+=|= \2 \+) )).*"
        r"(\bnorm\((p|w|params?|parameters?|weights?)\b|\b(p|w|params?|parameters?|weights?)\.(norm|pow|square)\(|"
        r"\b(p|w|params?|parameters?|weights?) ?\*\* ?2)",
        beside=True,
    ),
    Idiom(
        "smoothed_targets",
        "writes out targets for all classes to smooth them",
        "`torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)`, which needs the classes' numbers"
        " alone (`ignore_index=` for padding); it differs by a constant",
        _PYTORCH + "generated/torch.nn.functional.cross_entropy.html",
        ("forward", "rest"),
        source=r"\.scatter_\(.*(confidence|smooth|\beps|1(\.0)? - )|\bfull_like\(.*smooth|\.fill_\(.*smooth",
        beside=True,
    ),
    Idiom(
        "diagonal_covariance",
        "factors a covariance that is diagonal as if it were full, and solves with it for each row",
        "`torch.distributions.Independent(torch.distributions.Normal(mean, std), 1)`, whose parts need neither",
        "https://docs.pytorch.org/docs/stable/distributions.html#independent",
        LOOP,
        source=r"\bMultivariateNormal\(.*\bdiag(_embed|onal)?\(",
    ),
    Idiom(
        "separable_kernel",
        "convolves with the product of two lines",
        "convolve with one line after the other, each along its axis: of a kernel of k × k that is 2 × k products for"
        " each value",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.conv2d.html",
        (*DATA, *LOOP),
        source=r"conv\w*\(.*\b(outer|ger)\(|\b(outer|ger)\(.*conv\w*\(",
    ),
    Idiom(
        "loops_in_python",
        "loops in Python, one turn for each element",
        "write it as one operation on the whole (NumPy, tensors, a regular expression, a look-up table), or do it once,"
        " before training",
        "https://numpy.org/doc/stable/user/basics.broadcasting.html",
        (*DATA, *LOOP, *START),
        source=r"\bfor \w+ in range\(|\[.* for .* in .*\]|\bsum\(.* for ",
        last=True,
        unless=r"\(.*torch/nn/modules/(?!loss|module)",  # a loop over layers, heads or experts is none over elements
        loops=True,
    ),
    Idiom(
        "rows_stacked",
        "puts together what was taken row by row",
        "take all rows with one index (`array[rows]`, of several axes `array[episodes, steps]`), and compute on all of"
        " them at once, not on one after the other",
        "https://numpy.org/doc/stable/user/basics.indexing.html#advanced-indexing",
        ("rest",),
        source=r"\b(np|numpy)\.(v?stack|concatenate)\(",
        last=True,
    ),
    Idiom(
        "numpy_in_the_loop",
        "computes with NumPy, on one core, while training waits",
        "compute only the part that the step uses, or once before training what stays the same; or with tensors, on the"
        " GPU where there is one",
        "https://docs.pytorch.org/tutorials/beginner/basics/tensorqs_tutorial.html",
        ("rest", *START),
        source=r"\b(np|numpy)\.(?!load\b|random\b|save)\w+\(",
        last=True,
    ),
    Idiom(
        "evaluated",
        "evaluates",
        "evaluate under `torch.inference_mode()`, in larger batches; or every k-th time",
        _PYTORCH + "generated/torch.autograd.grad_mode.inference_mode.html",
        ("rest", "forward"),
        source=r"\b(evaluat|validat)\w*\(",
        first=False,
    ),
)

# What a line is called that is in a loop within the making of a sample, or within a step, and is not known otherwise.
LOOPS = "loops_in_python"

# What a line is called whose samples a filter then drops, as the statements around it say.
FILTERED = "made_then_filtered"


# Where libraries are installed: their files are named from there.
_PACKAGES = re.compile(r"\(.*[/\\](site|dist)-packages[/\\]")


@cache
def known(source: str, frames: tuple[str, ...], doing: str) -> Idiom | None:
    """Return what a line is known to be: by its source first, then by what it calls, the innermost first.

    `frames`: the function that it stands in, and those of libraries that it was seen in, "function (file:line)", the
    outermost first.
    """
    frames = tuple(_PACKAGES.sub("(", frame) for frame in frames)
    fitting = [
        one
        for one in IDIOMS
        if doing in one.doing and not (one.unless and any(re.search(one.unless, frame) for frame in frames))
    ]
    stack = "; ".join(frames)
    around = next((one for one in fitting if one.around and re.search(one.around, stack)), None)
    if around is not None:
        return around
    by_source = [one for one in fitting if one.source and re.search(one.source, source)]
    by_frames = (one for frame in reversed(frames) for one in fitting if one.frames and re.search(one.frames, frame))
    sure = (one for one in by_source if not one.last)
    return next(sure, None) or next(by_frames, None) or next(iter(by_source), None)


BY_NAME: Mapping[str, Idiom] = {one.name: one for one in IDIOMS}


def of_advice(text: str) -> str:
    """Return the name of what a line does, of which advice begins with the remedy; "": none."""
    return next((one.name for one in IDIOMS if text.startswith(one.remedy)), "")
