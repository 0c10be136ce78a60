create table if not exists items (id int primary key, name text, price int);
insert into items select n, repeat('item ', 8) || n, n from generate_series(1, 1000) as n on conflict do nothing;
