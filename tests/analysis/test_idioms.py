"""Idioms: which entry a line of a script is known by, from its source, or from what it was seen to call."""

from __future__ import annotations

import pytest

from dlprof.analysis.idioms import IDIOMS, known

LIBRARY = "/env/lib/python3.11/site-packages/"

# Where a line stands, its source, the functions that it was seen in (the outermost first), and the entry; "": none.
LINES = [
    ("worker", "with zipfile.ZipFile(path) as archive:", (), "zip_opened"),
    ("worker", "with open(path) as f:", ("__init__ (/usr/lib/python3.11/zipfile.py:1312)",), "zip_opened"),
    ("worker", 'with h5py.File(self.path, "…") as f:', (), "hdf5_opened"),
    ("worker", "return self.rows[index]", (f"__getitem__ ({LIBRARY}h5py/_hl/dataset.py:790)",), "hdf5_rows"),
    ("worker", "return self.rows[index]", (f"get ({LIBRARY}zarr/core/array.py:790)",), "zarr_rows"),
    ("worker", "return self.x[i], self.y[i]", (f"__getitem__ ({LIBRARY}h5py/_hl/dataset.py:790)",), "hdf5_rows"),
    ("worker", "return self.x[i], self.y[i]", (), "rows_by_index"),
    ("worker", "return [self.x[i] for i in rows]", (f"get ({LIBRARY}zarr/core/array.py:790)",), "zarr_rows"),
    ("fetch", "candidates = np.where(self.labels == label)[0]", (), "array_scanned"),
    ("worker", "rows = (self.labels == label).nonzero()", (), "array_scanned"),
    ("worker", "rows = np.where(mask, a, b)", (), ""),
    ("backward", "total.backward(retain_graph=True)", (), "graph_kept"),
    ("fetch", "line = next(itertools.islice(file, n, None))", (), "read_from_the_top"),
    ("rest", "drawn = self.rng.choice(others, 80, replace=False)", (), "drawn_without_repetition"),
    ("rest", "others = list(self.items - set(liked.tolist()))", (), "drawn_without_repetition"),
    ("rest", "return random.sample(self.items, count)", (), "drawn_one_by_one"),
    ("forward", "return torch.cat([angles.sin(), angles.cos()], -1)", (), "constants_anew"),
    ("forward", "mask = torch.tril(torch.ones(n, n))", (), "constants_anew"),
    ("forward", "distances = ((x[:, :, None] - y[:, None]) ** 2).sum(-1)", (), "pairs_expanded"),
    ("forward", "return torch.pow(x - y, 2).sum(3)", (), "pairs_expanded"),
    ("start", "self.apply(self.init_weights)", (f"trunc_normal_ ({LIBRARY}torch/nn/init.py:9)",), "weights_drawn"),
    ("fetch", "raw = zlib.decompress(chunk.read_bytes())", (), "unpacked"),
    ("worker", "return f.read()", ("read (/usr/lib/python3.11/gzip.py:300)",), "unpacked"),
    ("worker", 'x = np.load(f"{index}.npy")', (), "npz_loaded"),
    ("worker", "x = torch.load(self.files[index])", (), "torch_loaded"),
    ("worker", "frame = pd.read_csv(self.files[index])", (), "csv_parsed"),
    ("worker", "row = json.loads(self.lines[index])", (), "json_parsed"),
    ("worker", "row = self.frame.iloc[index]", (), "dataframe_rows"),
    (
        "worker",
        "row = self.frame[index]",
        (f"fast_xs ({LIBRARY}pandas/core/internals/managers.py:1)",),
        "dataframe_rows",
    ),
    (
        "worker",
        "row = self.data[index]",
        (f"format_row ({LIBRARY}datasets/formatting/formatting.py:1)",),
        "records_of_datasets",
    ),
    (
        "worker",
        "label = self.labels[index]",
        ("_callmethod (/usr/lib/python3.11/multiprocessing/managers.py:8)",),
        "manager_of_processes",
    ),
    ("worker", "return torch.tensor(rows)", (), "list_of_arrays"),
    ("worker", "return torch.tensor(self.frame.iloc[index].to_numpy())", (), "dataframe_rows"),
    ("fetch", "for x, y in loader:", (f"<genexpr> ({LIBRARY}torch/utils/data/dataset.py:207)",), "rows_of_tensors"),
    ("worker", "time.sleep(0.01)", (), "waits_by_sleeping"),
    ("worker", "with lock:", (), "waits_for_a_lock"),
    ("worker", "with self.cache_lock:", (), "waits_for_a_lock"),
    ("worker", "data = requests.get(url).content", (), "random_access_by_network"),
    ("worker", "image = image.filter(ImageFilter.GaussianBlur(8))", (), "filtered_at_full_size"),
    (
        "worker",
        "image = self.jitter(image)",
        (f"adjust_hue ({LIBRARY}torchvision/transforms/_functional_pil.py:8)",),
        "colours_at_full_size",
    ),
    ("worker", 'image = Image.open(path).convert("…")', (), "picture_decoded"),
    ("worker", "image = image.resize((224, 224))", (), "picture_resized"),
    (
        "worker",
        "x = self.to_tensor(image)",
        (f"to_tensor ({LIBRARY}torchvision/transforms/functional.py:1)",),
        "picture_to_tensor",
    ),
    ("worker", "x = self.transform(x)", (f"__call__ ({LIBRARY}albumentations/core/composition.py:1)",), "augmented"),
    ("worker", "x, rate = load(path)", (f"load ({LIBRARY}librosa/core/audio.py:1)",), "sound_decoded"),
    ("worker", "x = reader[index]", (f"get_batch ({LIBRARY}decord/video_reader.py:1)",), "video_decoded"),
    ("fetch", "ids = tokenizer(texts)", (), "tokenised"),
    ("fetch", "words = WORD.findall(text)", (), "regular_expressions"),
    ("fetch", "return pad_sequence(texts)", (), "padded_in_collate"),
    ("worker", "x = smooth(x)", (f"gaussian_filter ({LIBRARY}scipy/ndimage/_filters.py:1)",), "scipy_filters"),
    ("worker", "row = copy.deepcopy(self.rows[index])", (), "deep_copies"),
    ("fetch", "order = list(range(SIZE))", (), "whole_order"),
    ("worker", "row = self.db.execute(QUERY, (key,)).fetchone()", (), "database_queried"),
    ("worker", "subprocess.run(['ffmpeg', path])", (), "program_started"),
    ("worker", "files = sorted(os.listdir(self.root))", (), "folders_listed_again"),
    ("worker", "label = self.names.index(name)", (), "list_searched"),
    ("worker", "if word in self.stop_words:", (), "list_searched"),
    ("worker", "out = np.append(out, part)", (), "array_grown"),
    ("worker", "at = datetime.strptime(text, FORMAT)", (), "dates_parsed"),
    ("worker", "assert hashlib.md5(data).hexdigest() == self.sums[n]", (), "checksums"),
    ("worker", "n = random.choices(self.ids, self.weights)[0]", (), "drawn_with_weights"),
    ("worker", "spec = torch.stft(wave, 1024)", (), "spectra"),
    (
        "fetch",
        "for x in loader:",
        (f"ConcatDataset.__getitem__ ({LIBRARY}torch/utils/data/dataset.py:350)",),
        "nested_data_sets",
    ),
    ("worker", "return self.table.to_pandas()[index]", (), "whole_column"),
    ("worker", 'return self.file["images"][index]', (f"__getitem__ ({LIBRARY}h5py/_hl/dataset.py:9)",), "hdf5_rows"),
    ("worker", "graph = nx.Graph(edges)", (), "graphs_built"),
    ("worker", "x = old_api(x)", ("warn (/usr/lib/python3.11/warnings.py:99)",), "warned"),
    ("rest", 'logger.debug(f"{loss}")', (), "logged_by_python"),
    ("rest", "optimizer = torch.optim.Adam(model.parameters())", (), "optimizer_made"),
    ("worker", "self.cache[index] = decode(path)", (), "kept_by_a_worker"),
    ("fetch", "total = len(list(loader))", (), "loader_counted"),
    ("rest", "h = torch.tanh(x[:, t] @ w + h @ u)", (), "recurrence_by_hand"),
    ("rest", "with torch.autograd.profiler.profile():", (), "profiled"),
    ("rest", "model.train()", (), "mode_switched"),
    (
        "rest",
        "total = norm(model)",
        (f"named_parameters ({LIBRARY}torch/nn/modules/module.py:2)",),
        "parameters_listed",
    ),
    ("rest", "scheduler.advance()", (f"step ({LIBRARY}torch/optim/lr_scheduler.py:2)",), "schedules_by_hand"),
    ("start_worker", "with lock:", (), "lock_of_a_fork"),
    ("start", "from transformers import AutoModel", (), "imported"),
    ("start", "data = ImageFolder(root)", (), "folders_listed"),
    ("start", "rows = load(path)", (f"_iterdir ({LIBRARY[:-14]}glob.py:1)",), "folders_listed"),
    ("start", "frame = pd.read_csv(path)", (), "text_read"),
    ("start", "path = hf_hub_download(name)", (), "downloaded"),
    ("start", "model.load_state_dict(torch.load(path))", (), "weights_loaded"),
    ("start", "model = Net()", (f"reset_parameters ({LIBRARY}torch/nn/modules/linear.py:1)",), "weights_drawn"),
    ("worker", "x = np.random.normal(size=1000)", (), "drawn_by_numpy"),
    ("rest", "for name, kept in average.state_dict().items():", (), "average_of_weights"),
    ("rest", "kept *= 0.999", (), "average_of_weights"),
    ("rest", "kept.copy_(now)", ("update_ema ()",), "average_of_weights"),
    ("rest", "x = schema(x)", ("read_schema ()",), ""),
    ("rest", "self.ema.update(model)", (f"update ({LIBRARY}timm/utils/model_ema.py:1)",), "average_of_weights"),
    ("rest", "counts = np.histogram(parameter.grad.numpy())", (), "histograms"),
    ("rest", 'wandb.log({"…": loss})', (), "logged_to_a_service"),
    ("rest", "fig = plt.figure()", (), "figures_drawn"),
    ("rest", "order = torch.cat(scores).argsort()", (), "metrics_of_all"),
    ("rest", "auc = roc_auc_score(labels, scores)", (), "metrics_on_the_host"),
    ("rest", "overlap = iou(box, other)", (), "nms_by_hand"),
    ("rest", "total += loss.item()", (), "values_read_one_by_one"),
    ("rest", "if torch.isnan(p.grad).any():", (), "gradients_checked"),
    ("rest", "print(loss)", (), "printed"),
    ("rest", "torch.save(model.state_dict(), path)", (), "saved"),
    ("rest", "gc.collect()", (), "collected_by_hand"),
    ("rest", "torch.cuda.empty_cache()", (), "cache_emptied"),
    ("rest", "state, reward, done, *_ = env.step(action)", (), "games_played"),
    ("rest", "total = sum(x * x for x in values)", (), "loops_in_python"),
    ("rest", "evaluate(model, held_out)", (), "evaluated"),
    # Lines of which nothing is known.
    ("worker", "return self.made(index)", (), ""),
    ("rest", "loss = criterion(out, y)", (), ""),
    ("worker", "return self.rows[index]", (f"stack ({LIBRARY}torch/utils/data/_utils/collate.py:1)",), ""),
]


@pytest.mark.parametrize(("doing", "source", "frames", "name"), LINES, ids=[line[1] for line in LINES])
def test_a_line_is_known_by_its_source_or_by_what_it_calls(
    doing: str, source: str, frames: tuple[str, ...], name: str
) -> None:
    found = known(source, frames, doing)
    assert (found.name if found else "") == name


def test_every_entry_has_a_line_that_shows_it() -> None:
    assert {one.name for one in IDIOMS} == {line[3] for line in LINES} - {""}
